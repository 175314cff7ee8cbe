"""Compiled steps on disk: the same result to the last bit, and never a graph of other settings."""

import os
import shutil
from pathlib import Path

import program
import pytest
from world import lora_bytes, metrics, without_time

from flux_db.check.compile_time import expected_time
from flux_db.errors import RunError
from flux_db.model import compile_cache, device
from flux_db.model.compile_cache import StoredGraphs
from flux_db.settings.schema import to_flat_dict

# Everything whose state is a parameter of the graph: dropout key, window, loss scale.
HARD = {"mixed_precision": "fp16", "lora_dropout": 0.1, "gradient_accumulation_steps": 2}


def train(settings: dict):
    done = program.run(program.trainer(settings))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def test_a_loaded_step_gives_the_same_bits_and_another_setting_another_step(world, tmp_path):
    graphs = tmp_path / "graphs"
    cached = {
        "compile_cache": "on",
        "compile_cache_dir": graphs,
        "lora_layers": "single_transformer_blocks.0.attn.to_q",
    }
    first, second = (
        train(world.settings(tmp_path / name, **HARD, **cached, max_train_steps=3)) for name in ("first", "second")
    )
    assert "stored in" in first and "Compiling the training step" in first
    assert "loaded from" in second and "Loading the compiled training step" in second and "Compiling" not in second
    assert lora_bytes(tmp_path / "first") == lora_bytes(tmp_path / "second")
    assert without_time(metrics(tmp_path / "first")) == without_time(metrics(tmp_path / "second"))
    # more steps are the same graph, so a resume loads it; another beta is another graph
    (folder,) = graphs.iterdir()
    more = world.settings(tmp_path / "second", **HARD, **cached, max_train_steps=4, resume_from_checkpoint="latest")
    resumed = train(more)
    assert "loaded from" in resumed and [f.name for f in graphs.iterdir()] == [folder.name]
    # a run that was killed after its last step has none left to compile
    assert "Going on from" in train(more)


def test_what_is_part_of_the_name(world, tmp_path):
    def name(**changes) -> str:
        return compile_cache.key({"settings": compile_cache.graph_settings(world.config(tmp_path / "out", **changes))})

    assert name() == name(max_train_steps=9, learning_rate=0.5, output_dir="elsewhere", validation_seed=3)
    changed = [{"adam_beta1": 0.5}, {"rank": 8}, {"lora_dropout": 0.1}, {"seed": 1}, {"jit_level": "O0"}]
    changed += [{"guidance_scale": 2.0}, {"max_grad_norm": 0.5}, {"gradient_checkpointing": True}]
    assert len({name(), *(name(**one) for one in changed)}) == len(changed) + 1
    assert to_flat_dict(world.config(tmp_path / "out")).keys() >= compile_cache.OUTSIDE


def test_the_name_depends_on_sources_and_versions(tmp_path):
    shutil.copytree(
        program.ROOT / "flux_db" / "model", tmp_path / "model", ignore=shutil.ignore_patterns("__pycache__")
    )
    before = compile_cache.sources_digest(tmp_path)
    (tmp_path / "model" / "flow.py").write_text("x = 1\n")
    assert compile_cache.sources_digest(tmp_path) != before
    versions = [compile_cache.versions(device.AscendFacts(cann=cann)) for cann in ("8.2", "8.3")]
    assert versions[0] != versions[1] and versions[0]["mindspore"]


@pytest.fixture
def untaken(monkeypatch):
    monkeypatch.setattr(StoredGraphs, "_is_taken", False)


def compile_something(count: int = 1) -> None:
    """What MindSpore leaves in the folder."""
    folder = Path(os.environ[compile_cache.PLACE], "rank_0", "graph_cache")
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"compile_cache_{number}.mindir").write_bytes(b"graph")


def test_a_folder_is_whole_or_absent(tmp_path, untaken, capsys):
    with pytest.raises(ValueError), StoredGraphs(tmp_path, "key", 1).storing():
        compile_something()
        raise ValueError("the compilation fails half-way")
    assert not list(tmp_path.iterdir())
    StoredGraphs._is_taken = False
    with StoredGraphs(tmp_path, "key", 2).storing():
        compile_something(1)  # of two
    assert not list(tmp_path.iterdir()) and "did not store" in capsys.readouterr().err
    assert compile_cache.ENABLE not in os.environ


def test_a_graph_with_hidden_parameters_is_not_stored(tmp_path, untaken, capsys):
    stored = StoredGraphs(tmp_path, "key", 1)
    with stored.storing():
        compile_something()
        stored.hidden.append("scale_value")
    assert not list(tmp_path.iterdir()) and "hides parameters: scale_value" in capsys.readouterr().err


def test_a_stored_graph_that_cannot_be_loaded_is_removed(tmp_path, untaken):
    with StoredGraphs(tmp_path, "key", 1).storing():
        compile_something()
    StoredGraphs._is_taken = False
    stored = StoredGraphs(tmp_path, "key", 1)
    assert stored.is_stored
    with pytest.raises(RunError, match="was removed"), stored.storing():
        raise IndexError("MindSpore")
    assert not list(tmp_path.iterdir())


def test_one_process_uses_one_folder(tmp_path, untaken):
    with StoredGraphs(tmp_path, "one", 1).storing():
        compile_something()
    other = StoredGraphs(tmp_path, "two", 1)
    with other.storing():
        assert compile_cache.ENABLE not in os.environ
    assert not other.is_usable and [f.name for f in tmp_path.iterdir()] == ["one"]


def test_old_graphs_are_removed(tmp_path, untaken, monkeypatch):
    monkeypatch.setattr(compile_cache, "MOST_KEPT", 2)
    for number in range(3):
        StoredGraphs._is_taken = False
        with StoredGraphs(tmp_path, f"key{number}", 1).storing():
            compile_something()
        os.utime(tmp_path / f"key{number}", (number, number))
    StoredGraphs._is_taken = False
    with StoredGraphs(tmp_path, "key3", 1).storing():
        compile_something()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["key2", "key3"]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, untaken, capsys):
    (tmp_path / "file").write_text("")
    with StoredGraphs(tmp_path / "file" / "graphs", "key", 1).storing():
        assert compile_cache.ENABLE not in os.environ
    assert "warning: --compile_cache" in capsys.readouterr().err


def test_mindspores_own_switch_is_refused(world, tmp_path):
    done = program.run(
        program.trainer(world.settings(tmp_path / "out")), env=program.environment(**{compile_cache.ENABLE: "1"})
    )
    assert done.returncode == 2 and "MS_COMPILER_CACHE_ENABLE=1" in done.stderr


@pytest.mark.parametrize(
    ("blocks", "device", "text"),
    [
        (57, "Ascend", "about 5 to 14 minutes"),
        (57, "CPU", "about 2 to 4 minutes"),
        (6, "CPU", ""),
        (20, "CPU", "about 1 minute"),
    ],
)
def test_the_time_of_compiling_is_announced(blocks, device, text):
    assert expected_time(blocks, device) == text
