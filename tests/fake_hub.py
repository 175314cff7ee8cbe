"""A Hugging Face hub on this machine: just enough of its interface for the real client to upload a model."""

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeHub:
    """`repos` holds what was uploaded: name -> {"private": bool, "files": {path: bytes}}.

    `models` everybody can look up: name -> {"gated": "manual" or False, "sizes": {path: bytes}, "denied": bool}.
    """

    def __init__(self, token="hf_secret", owner="me"):
        self.token, self.owner = token, owner
        self.repos, self.models = {}, {}
        self.requests = []
        self.fails = {}
        """Pattern of a path -> status to answer with."""
        self._large = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self):
                body = self._body()
                hub.requests.append(f"{self.command} {self.path}")
                self._answer(*hub.answer(self.command, self.path, self.headers, body))

            do_GET = do_POST = do_PUT = do_HEAD = handle_any

            def _body(self):
                if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                data = b""
                while size := int(self.rfile.readline(), 16):
                    data += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return data

            def _answer(self, status, content, headers=()):
                data = json.dumps(content).encode()
                self.send_response(status)
                for name, value in dict(headers).items():
                    self.send_header(name, value)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method, path, headers, body):
        for pattern, status in self.fails.items():
            if re.search(pattern, path):
                return status, {"error": "made to fail"}
        if path.startswith("/lfs/"):
            self._large[path.removeprefix("/lfs/")] = body
            return 200, {}
        match = re.match(r"/api/models/([\w.-]+/[\w.-]+?)(/auth-check)?(?:\?|$)", path)
        if match and match[1] in self.models:
            return self._described(match[1], bool(match[2]))
        if headers.get("Authorization") != f"Bearer {self.token}":
            return 401, {"error": "Invalid token"}
        if path == "/api/whoami-v2":
            return 200, {"name": self.owner, "type": "user"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if match := re.fullmatch(r"/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", path):
            return 200, {"transfer": "basic", "objects": [self._place(o) for o in json.loads(body)["objects"]]}
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/(preupload|commit)/main)?", path.partition("?")[0]):
            return self._in_repo(match[1], match[2], body)
        return 404, {"error": f"no such address: {path}"}

    def _described(self, name, asks_access):
        model = self.models[name]
        if asks_access and model.get("denied"):
            return 403, {"error": "Access is restricted"}, {"X-Error-Code": "GatedRepo"}
        siblings = [{"rfilename": path, "size": size} for path, size in model["sizes"].items()]
        return 200, {"id": name, "gated": model["gated"], "siblings": siblings, "tags": [], "downloads": 0}

    def _create(self, wanted):
        name = f"{wanted.get('organization') or self.owner}/{wanted['name']}"
        if name in self.repos:
            return 409, {"error": "exists already", "url": f"{self.url}/{name}"}
        self.repos[name] = {"private": wanted.get("private", False), "files": {}}
        return 200, {"url": f"{self.url}/{name}", "name": name}

    def _place(self, wanted):
        upload = {"href": f"{self.url}/lfs/{wanted['oid']}"}
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": upload}}

    def _in_repo(self, name, action, body):
        if name not in self.repos:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        repo = self.repos[name]
        if action is None:
            return 200, {"id": name, "private": repo["private"], "siblings": [], "tags": [], "downloads": 0}
        if action == "preupload":
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
                for f in json.loads(body)["files"]
            ]
            return 200, {"files": [{**mode, "shouldIgnore": False, "oid": None} for mode in modes]}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                repo["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo["files"][value["path"]] = self._large[value["oid"]]
        return 200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.url}/{name}/commit/{'0' * 40}"}
