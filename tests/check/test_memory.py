"""Host memory is compared with what loading takes, before anything is loaded."""

import json

import pytest
from program import command, flags, run

from flux_db.check import memory
from flux_db.check.memory import LOCAL_DEVICES, PROGRAM_BYTES, memory_lines, memory_problems, memory_warnings
from flux_db.data.dataset import number_of_devices
from flux_db.settings.command_line import Given

# The transformer and the T5 of FLUX.1-dev
TRANSFORMER = {"num_layers": 19, "num_single_layers": 38, "num_attention_heads": 24, "attention_head_dim": 128}
TRANSFORMER |= {"axes_dims_rope": [16, 56, 56], "in_channels": 64, "joint_attention_dim": 4096}
TRANSFORMER |= {"pooled_projection_dim": 768, "guidance_embeds": True}
T5 = {"d_model": 4096, "d_kv": 64, "num_heads": 64, "d_ff": 10240, "num_layers": 24, "vocab_size": 32128}
T5 |= {"feed_forward_proj": "gated-gelu"}
CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
CLIP |= {"vocab_size": 49408, "max_position_embeddings": 77}


@pytest.fixture
def config(world, tmp_path, monkeypatch):
    """Settings of a run on a model of which only the settings are there."""
    for name in ("MS_WORKER_NUM", LOCAL_DEVICES):
        monkeypatch.delenv(name, raising=False)
    for part, content in (("transformer", TRANSFORMER), ("text_encoder_2", T5), ("text_encoder", CLIP)):
        (tmp_path / "flux" / part).mkdir(parents=True)
        (tmp_path / "flux" / part / "config.json").write_text(json.dumps(content))

    def make(**changes):
        model = str(tmp_path / "flux")
        return world.config(
            tmp_path / "out", **{"pretrained_model_name_or_path": model, "mixed_precision": "bf16", **changes}
        )

    return make


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with so many GB."""

    def make(total: float, available: float) -> None:
        file = tmp_path / "meminfo"
        lines = ("MemTotal:", total), ("MemFree:", 1.0), ("MemAvailable:", available)
        file.write_text("".join(f"{name:15} {int(size * 1e9 / 1024)} kB\n" for name, size in lines))
        monkeypatch.setattr(memory, "MEMINFO", file)

    return make


def devices(monkeypatch, count: int, here: int | None = None) -> None:
    monkeypatch.setenv("MS_WORKER_NUM", str(count))
    if here:
        monkeypatch.setenv(LOCAL_DEVICES, str(here))


def test_clip_is_counted_where_it_is_trained(config, machine):
    machine(64, 60)
    plain, trained = config(), config(train_text_encoder=True)
    assert memory.clip_bytes(plain) == 0 and not any("CLIP" in line for line in memory_lines(plain))
    assert memory.clip_bytes(trained) == 2 * 123_060_480
    lines = memory_lines(trained)
    assert lines[0].endswith("in one process for the transformer and CLIP")
    assert "CLIP, which is trained, takes 0.25 GB of that, and as much on each device" in lines


def test_one_process_needs_the_model_in_its_own_type(config, machine):
    machine(64, 60)
    assert memory_problems(config()) == memory_warnings(config()) == []
    size = 11_901_408_320 * 2 + PROGRAM_BYTES
    assert memory_lines(config()) == [
        f"{size / 1e9:.1f} GB in one process for the transformer",
        "10.2 GB in one process for T5, if there is something to encode",
        "60.0 GB of 64.0 GB are available now",
    ]
    machine(64, 20)
    (warning,) = memory_warnings(config())
    assert warning.startswith(
        "host memory: loading takes 24.5 GB in one process for the transformer, and 20.0 GB are available now"
    )
    machine(24, 20)
    assert memory_problems(config()) == [
        "host memory: loading takes 24.5 GB in one process for the transformer, and this machine has 24.0 GB; "
        "use a machine with more memory"
    ]
    (problem,) = memory_problems(config(mixed_precision="no"))
    assert "48.3 GB" in problem and problem.endswith(
        "use --mixed_precision bf16 or fp16 or use a machine with more memory"
    )


def test_the_processes_of_this_server_count(config, machine, monkeypatch):
    machine(180, 170)
    devices(monkeypatch, 8)
    (problem,) = memory_problems(config())
    assert "8 processes x 24.5 GB = 196.0 GB for the transformer, and this machine has 180.0 GB" in problem
    assert "use fewer devices or add --shard_base" in problem
    assert memory_problems(config(shard_base=True)) == []
    # an eighth of the linear layers in each process
    assert memory_lines(config(shard_base=True))[0] == "8 processes x 3.7 GB = 29.4 GB for the transformer"
    devices(monkeypatch, 16, here=4)
    assert number_of_devices() == 16 and memory_problems(config()) == memory_warnings(config()) == []
    assert memory_lines(config())[0] == "4 processes x 24.5 GB = 98.0 GB for the transformer"


def test_nothing_is_said_where_nothing_is_known(config, machine, tmp_path, monkeypatch):
    machine(8, 8)
    hub = config(pretrained_model_name_or_path="black-forest-labs/FLUX.1-dev")
    assert memory_problems(hub) == memory_warnings(hub) == memory_lines(hub) == []
    assert len(memory_problems(hub, tmp_path / "flux")) == 1 and len(memory_warnings(hub, tmp_path / "flux")) == 2
    (tmp_path / "flux" / "transformer" / "config.json").write_text('{"num_layers": -1}')
    assert memory_problems(config()) == []
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "absent")
    assert memory_warnings(config()) == [] and len(memory_lines(config())) == 1


def test_check_prints_it(world, tmp_path):
    done = run(command("check", *flags(world.settings(tmp_path / "out"))))
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("  host memory        "))
    assert line.endswith("GB in one process for the transformer")


def test_a_model_too_large_for_the_machine_is_a_problem_among_all_others(config, machine):
    """As the trainer and `check` ask: together with the checks of the settings."""
    machine(24, 20)
    (problem,) = Given(config(), (), frozenset()).problems_by(memory_problems)
    assert problem.startswith("host memory: loading takes 24.5 GB")
    assert problem.flags == {"shard_base", "mixed_precision"}
