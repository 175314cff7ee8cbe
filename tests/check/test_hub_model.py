"""`check` with a model that is not here: what the hub answers, and whether the run can start."""

import program
import pytest
from fake_hub import FakeHub

SIZES = {"model_index.json": 500, "transformer/a.safetensors": 23_800_000_000, "flux1-dev.safetensors": 10**15}


@pytest.fixture(scope="module")
def hub():
    with FakeHub() as hub:
        hub.models["owner/open"] = {"gated": False, "sizes": SIZES}
        hub.models["owner/gated"] = {"gated": "manual", "sizes": SIZES}
        hub.models["owner/denied"] = {"gated": "manual", "sizes": SIZES, "denied": True}
        hub.models["owner/huge"] = {"gated": False, "sizes": {"transformer/a.safetensors": 10**17}}
        yield hub


def check(world, tmp_path, name, **variables):
    settings = world.settings(tmp_path / "out", pretrained_model_name_or_path=name, cache_dir=tmp_path / "hub")
    done = program.run(program.command("check", *program.flags(settings)), env=program.environment(**variables))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "token", "state", "problem"),
    [
        ("owner/open", None, "not here; 23.8 GB to fetch, open to all; ", None),
        ("owner/gated", "hf_secret", "not here; 23.8 GB to fetch, gated, login found; ", None),
        ("owner/gated", None, "gated, no login found", "is gated: accept its licence on its page, and log in with"),
        ("owner/denied", "hf_secret", "gated, login found", "the account of your login may not read it; accept its"),
        ("owner/absent", "hf_secret", "not here", "is neither a folder nor on the hub; check the name"),
        ("owner/huge", None, "100000000.0 GB to fetch", "GB free; make room, or choose another disk with --cache_dir"),
    ],
)
def test_check_reports_what_a_model_on_the_hub_needs(hub, world, tmp_path, name, token, state, problem):
    variables = {"HF_ENDPOINT": hub.url, **({"HF_TOKEN": token} if token else {})}
    text = check(world, tmp_path, name, **variables)
    assert state in next(line for line in text.splitlines() if line.startswith("  model "))
    assert ("No problems: the run can start." in text) == (problem is None)
    if problem:
        assert f"--pretrained_model_name_or_path {name}: " in text and problem in text


def test_a_hub_that_cannot_be_asked_is_no_reason_to_promise_a_start(world, tmp_path):
    text = check(world, tmp_path, "owner/model", HF_HUB_OFFLINE="1")
    assert "not here; about 34 GB if it is as large as FLUX.1-dev" in text
    assert "the hub cannot be asked now" in text and "the run can start" not in text


def test_a_model_that_was_fetched_before_is_here_without_a_question_to_the_hub(world, tmp_path):
    place = tmp_path / "hub" / "models--owner--model"  # the layout of the hub's cache
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    (place / "snapshots").mkdir()
    (place / "snapshots" / ("0" * 40)).symlink_to(world.model)
    text = check(world, tmp_path, "owner/model", HF_HUB_OFFLINE="1")
    assert "model              here, in " in text and "No problems: the run can start." in text
