"""A hub on this machine that answers every question with the same nonsense; the address says which."""

from __future__ import annotations

import functools
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fuzzing import hostile

# First part of the path -> status, headers, body.
ANSWERS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "page": (200, {"Content-Type": "text/html"}, hostile.HTML),
    "nothing": (200, {}, b""),
    "list": (200, {"Content-Type": "application/json"}, b"[]"),
    "null": (200, {"Content-Type": "application/json"}, b"null"),
    "number": (200, {"Content-Type": "application/json"}, b'{"name": 5}'),
    "object": (200, {"Content-Type": "application/json"}, b"{}"),
    "deep": (200, {"Content-Type": "application/json"}, hostile.deep("[", "]", 100_000).encode()),
    "refused": (401, {}, b'{"error": "Invalid token"}'),
    "forbidden": (403, {}, b'{"error": "no"}'),
    "broken": (500, {}, hostile.HTML),
    "escape": (400, {"X-Error-Message": "a\x1b[31mb"}, b'{"error": "\\u001b[31mred"}'),
    "loop": (307, {"Location": "/loop/again"}, b""),
}


class _Handler(BaseHTTPRequestHandler):
    def answer(self) -> None:
        status, headers, body = ANSWERS[self.path.split("/")[1]]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_POST = do_HEAD = answer

    def log_message(self, *_: object) -> None:
        pass


@functools.cache
def address() -> str:
    """Of the server, which runs to the end of the process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"
