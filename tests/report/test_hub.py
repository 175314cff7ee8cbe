"""The model card, and the upload with the real client to a hub on this machine."""

import ast
import html
import os
import re
import shlex
import shutil
import subprocess
import threading
from pathlib import Path

import program
import pytest
import yaml
from fake_hub import FakeHub
from huggingface_hub import ModelCard
from PIL import Image

from flux_db.errors import UserError
from flux_db.lora import trained_file
from flux_db.model.identity import licence
from flux_db.output_folder import LORA_FILE
from flux_db.report import hub, model_card, run_page
from flux_db.run import sample_files
from flux_db.run.record import read_run
from flux_db.settings import secrets
from flux_db.settings.command_line import parse_config, to_yaml
from flux_db.settings.schema import from_flat_dict

TOKEN = "hf_abcdefghijklmnop"
FACTS = trained_file.Facts(steps=60, pictures=5, global_batch=2)


def settings(output, **changes):
    return {
        "pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev",
        "instance_data_dir": "/secret/pictures",
        "instance_prompt": 'a "photo": of sks | dog # 1',
        "output_dir": str(output),
        **changes,
    }


def config_of(output, **changes):
    return from_flat_dict(settings(output, **changes))


@pytest.fixture
def output(tmp_path):
    """A finished run, and what must stay on this machine."""
    folder = tmp_path / "secret" / "my-dog"
    for name in ("cache/latent.safetensors", "checkpoint-5/state.json", "logs/events", "config.yaml", "metrics.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("private")
    for step in (0, 60):
        (folder / f"samples/step-{step:05d}").mkdir(parents=True)
        for number, prompt in enumerate(["one: prompt", "one: prompt", "two", "two"]):
            picture = Image.new("RGB", (8, 8), (step, number, 0))
            path = folder / f"samples/step-{step:05d}/{number:02d}.png"
            sample_files.write(path, picture, prompt=prompt, number=number % 2, seed=0)
    Image.new("RGB", (8, 8)).save(folder / "samples/grid.png")
    (folder / LORA_FILE).write_bytes(os.urandom(5000))
    return folder


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FakeHub(token=TOKEN) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        yield server


UPLOADED = {
    LORA_FILE,
    "README.md",
    "samples/grid.png",
    *(f"samples/step-00060/0{n}.png" for n in range(4)),
}


# ---- The device ----


def test_the_header_is_what_the_hub_expects(output):
    config = config_of(output, validation_prompt=["one: prompt", "two"], num_validation_images=2)
    text = model_card.card(config, FACTS)
    header = yaml.safe_load(text.split("---")[1])
    assert ModelCard(text).data.base_model == "black-forest-labs/FLUX.1-dev"
    assert header["base_model_relation"] == "adapter" and header["library_name"] == "diffusers"
    assert {"lora", "flux", "text-to-image", "dreambooth", "mindspore"} <= set(header["tags"])
    assert (header["license"], header["license_name"]) == ("other", "flux-1-dev-non-commercial-license")
    assert header["instance_prompt"] == config.data.instance_prompt
    assert [(w["output"]["url"], w["text"]) for w in header["widget"]] == [
        (f"samples/step-00060/0{n}.png", prompt)
        for n, prompt in enumerate(["one: prompt", "one: prompt", "two", "two"])
    ]
    for part in ("samples/grid.png", "mindone", "torch_dtype", "ComfyUI", "| Steps | 60 |"):
        assert part in text
    assert "secret" not in text


def test_the_code_in_the_card_is_code(output):
    text = model_card.card(config_of(output), FACTS)
    blocks = text.split("```python\n")[1:]
    assert len(blocks) == 2
    for block in blocks:
        compile(block.split("```")[0], "card", "exec")


def test_card_and_report_draw_as_the_samples_were_drawn(output):
    config = config_of(output, resolution=64, max_sequence_length=20, validation_inference_steps=12)
    (output / "config.yaml").write_text(to_yaml(config))
    card, report = model_card.card(config, FACTS), html.unescape(run_page.render(read_run(output)))
    values = "height=64 width=64 num_inference_steps=12 guidance_scale=3.5 max_sequence_length=20"
    how = ",\n    ".join(values.split())
    assert card.count(how) == report.count(how) == 2
    prompt = "--prompt 'a \"photo\": of sks | dog # 1' -o pictures"
    assert f"python -m flux_db generate --lora path/to/this/folder {prompt}" in card
    assert f"python -m flux_db generate --lora {output} {prompt}" in report


def test_texts_of_others_stay_texts_in_the_card(output):
    """A prompt that would be Markdown, HTML, an end of the header or of the code, or a row of the table."""
    hostile = "sks](https://x.y) <script>x</script>\n---\nlicense: mit\n```\n# head | `code` \x1b[2J \u202e !dog"
    config = config_of(output, instance_prompt=hostile, lora_layers=f"a|b,{hostile}")
    sample_files.write(output / "samples/step-00060/00.png", Image.new("RGB", (8, 8)), prompt=hostile, number=0, seed=1)
    text = model_card.card(config, FACTS)
    assert not {"\x1b", "\u202e"} & set(text)
    header = yaml.safe_load(text.split("\n---\n")[0].removeprefix("---"))
    assert header["license"] == "other" and "license: mit" in header["instance_prompt"]
    assert header == ModelCard(text).data.to_dict()
    body = text.split("\n---\n")[1]
    outside = re.sub(r"```(?:python|bash)\n.*?\n```", "", body, flags=re.DOTALL)
    outside = re.sub(r"`[^`\n]*`", "", outside)
    assert "](https://x.y" not in outside and "<script>" not in outside
    assert [line for line in outside.splitlines() if line.startswith("#")] == [
        "# FLUX.1 LoRA: ", "## Samples", "## Use it", "## Settings",
    ]  # fmt: skip
    assert all(line.count("|") == 3 for line in outside.splitlines() if line.startswith("|"))
    for block in body.split("```python\n")[1:]:
        code = ast.parse(block.split("\n```")[0])
        prompts = [node.value for node in ast.walk(code) if isinstance(node, ast.Constant)]
        assert hostile in prompts, "the code draws with the very prompt"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_a_readme_that_is_no_file_stays(output, make):
    make(output / "README.md")
    before = os.lstat(output / "README.md").st_ino
    model_card.write_card(config_of(output), FACTS)
    assert os.lstat(output / "README.md").st_ino == before


@pytest.mark.parametrize(
    ("model", "readme", "wanted"),
    [
        ("black-forest-labs/FLUX.1-schnell", None, ("apache-2.0", None)),
        ("tuned", "---\nlicense: mit\n---\nhello", ("mit", None)),
        ("tuned", "---\nlicense: other\nlicense_name: mine\n---\n", ("other", "mine")),
        ("tuned", "---\r\nlicense: \"mit\" # of 1988\r\nlicense_name: 'a name'\r\n---\r\n", ("mit", "a name")),
        ("tuned", "no header", ("other", None)),
        ("tuned", None, ("other", None)),
    ],
)
def test_the_licence_is_that_of_the_base(tmp_path, model, readme, wanted):
    if model == "tuned":
        (tmp_path / model).mkdir()
        if readme is not None:
            (tmp_path / model / "README.md").write_text(readme)
        model = str(tmp_path / model)
    assert licence(model)[:2] == wanted


def test_a_local_base_without_a_name_gives_a_card_all_the_same(tmp_path, output):
    (tmp_path / "secret/model").mkdir(parents=True)
    text = model_card.card(config_of(output, pretrained_model_name_or_path=str(tmp_path / "secret/model")), FACTS)
    assert "base_model" not in ModelCard(text).data.to_dict()
    assert "secret" not in text and str(tmp_path) not in text


def test_somebody_elses_readme_stays(output):
    model_card.write_card(config_of(output), FACTS)
    first = (output / "README.md").read_text()
    model_card.write_card(config_of(output, rank=8), FACTS)
    assert (output / "README.md").read_text() != first
    (output / "README.md").write_text("my own words")
    model_card.write_card(config_of(output), FACTS)
    assert (output / "README.md").read_text() == "my own words"


# ---- The upload ----


def test_lora_card_and_last_samples_are_uploaded_and_nothing_else(output, server, capsys):
    config = config_of(output, push_to_hub=True)
    model_card.write_card(config, FACTS)
    assert hub.check_hub(config) == []
    assert hub.push_run(config) == 0
    assert f"{server.url}/me/my-dog" in capsys.readouterr().out
    (repo,) = server.repos.values()
    assert repo["private"] is True
    assert set(repo["files"]) == UPLOADED
    assert all(repo["files"][name] == (output / name).read_bytes() for name in UPLOADED)
    assert hub.push_run(config) == 0, "again into the same repository"
    assert hub.push_run(config_of(output, push_to_hub=True, hub_model_id="team/dog", hub_private=False)) == 0
    assert server.repos["team/dog"]["private"] is False


@pytest.mark.parametrize("address", ["repos/create", "preupload", "lfs/objects/batch", "commit"])
def test_a_failed_upload_loses_nothing_and_tells_how_to_try_again(output, server, capfd, address):
    config = config_of(output, push_to_hub=True, hub_model_id="me/dog", hub_private=False)
    model_card.write_card(config, FACTS)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    server.fails[address] = 500
    assert hub.push_run(config) == 1
    text = capfd.readouterr().err
    assert "500" in text and "Traceback" not in text and TOKEN not in text
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    command = shlex.split(text.strip().splitlines()[-1])
    assert command[:4] == ["python", "-m", "flux_db", "push"]
    server.fails.clear()
    if address != "commit":
        return  # the printed command is the same: not four times
    environment = program.environment(HF_ENDPOINT=server.url, HF_TOKEN=TOKEN)
    done = program.run([program.PYTHON, *command[1:]], env=environment)
    assert done.returncode == 0, done.stderr
    assert set(server.repos["me/dog"]["files"]) == UPLOADED
    assert done.stdout.strip() == f"{server.url}/me/dog"


def test_what_lies_elsewhere_is_not_uploaded(output, server, tmp_path):
    """A link out of the folder, a pipe, and a name that would be read as a pattern."""
    config = config_of(output, push_to_hub=True)
    (tmp_path / "private").write_text("mine")
    (output / "README.md").symlink_to(tmp_path / "private")
    (output / "samples/grid.png").unlink()
    os.mkfifo(output / "samples/grid.png")
    shutil.copyfile(output / "samples/step-00060/00.png", output / "samples/step-00060/0?.png")
    assert hub.push_run(config) == 0
    (repo,) = server.repos.values()
    assert set(repo["files"]) == (UPLOADED | {"samples/step-00060/0?.png"}) - {"README.md", "samples/grid.png"}
    (output / LORA_FILE).unlink()
    os.mkfifo(output / LORA_FILE)
    with pytest.raises(UserError, match=LORA_FILE):
        hub.find_run(output)


def test_push_wants_a_finished_run(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        hub.find_run(tmp_path / "x")
    with pytest.raises(UserError, match=LORA_FILE):
        hub.find_run(tmp_path)


# ---- Checks at the start ----


def problem(output, **changes):
    problems = hub.check_hub(config_of(output, push_to_hub=True, **changes))
    return problems[0] if problems else None


def test_what_would_fail_after_hours_is_found_at_the_start(output, server, monkeypatch, capfd):
    assert "is not a name for the hub" in problem(output, hub_model_id="a/b/c")
    assert "is not a name for the hub" in problem(output.with_name("my dog!"))
    assert not server.requests
    server.repos["me/my-dog"] = {"private": False, "files": {}}
    assert "is public" in problem(output)
    assert problem(output, hub_private=False) is None
    server.fails["whoami"] = 503
    assert problem(output) is None
    assert "cannot be asked now" in capfd.readouterr().err, "a hub that is down now may be up at the end"
    server.fails.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept the token" in problem(output)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(output / "none"))
    assert "there is no token" in problem(output)


def test_an_unreachable_hub_is_a_warning(output, server, monkeypatch, capfd):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert problem(output) is None
    assert "cannot be asked now" in capfd.readouterr().err
    assert hub.push_run(config_of(output, push_to_hub=True)) == 1
    assert "To try again" in capfd.readouterr().err


def test_nothing_is_asked_without_the_flag(output, server):
    assert hub.check_hub(config_of(output)) == []
    assert server.requests == []


# ---- The token ----


@pytest.mark.parametrize("words", [["--hub_token", TOKEN], [f"--hub_token={TOKEN}"]])
def test_the_token_leaves_the_words(words):
    kept, token = secrets.without_token(["python", "x.py", *words, "--rank", "4"])
    assert (kept, token) == (["python", "x.py", "--rank", "4"], TOKEN)


def test_a_token_is_no_setting(tmp_path):
    (tmp_path / "run.yaml").write_text(f"hub_token: {TOKEN}\n")
    with pytest.raises(UserError) as caught:
        parse_config(["--config", str(tmp_path / "run.yaml")], checks=())
    assert "hub_token: not used here: a token is no setting" in str(caught.value) and TOKEN not in str(caught.value)
    with pytest.raises(UserError, match="needs a token"):
        secrets.without_token(["x", "--hub_token", "--rank"])


def test_the_process_does_not_show_its_token(world, tmp_path, server):
    """The script waits for the hub's answer at its start: long enough to read its words as `ps` does."""
    asked, go_on = threading.Event(), threading.Event()
    answer = server.answer

    def wait(*request):
        asked.set()
        go_on.wait(300)
        return answer(*request)

    server.answer = wait
    server.token = "another"
    settings = world.settings(tmp_path / "out", hub_token=TOKEN, push_to_hub=True)
    environment = program.environment(HF_ENDPOINT=server.url)
    process = program.start(program.trainer(settings), env=environment, stderr=subprocess.PIPE)
    try:
        assert asked.wait(200)
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
    finally:
        go_on.set()
        text = process.communicate(timeout=200)[1]
    assert "--push_to_hub" in shown and TOKEN not in " ".join(shown) and "--hub_token" not in shown
    assert process.returncode == 2 and "does not accept the token" in text and TOKEN not in text
    assert not (tmp_path / "out").exists()
