"""Compiled graphs on disk: the same result to the last bit, and never a graph of other settings."""

import os
import shutil
from pathlib import Path

import mindspore as ms
import numpy as np
import program
import pytest
from mindspore import Parameter, Tensor, nn, ops
from world import lora_bytes, metrics, without_time

from flux_db.check.compile_time import expected_time
from flux_db.demo.pictures import write_demo_pictures
from flux_db.errors import RunError
from flux_db.model import compile_cache, device
from flux_db.model.compile_cache import GraphStore

# Everything whose state is a parameter of the graph: dropout key, window, loss scale; and every kind of graph.
HARD = {"mixed_precision": "fp16", "lora_dropout": 0.1, "gradient_accumulation_steps": 2}
ROUNDS = {
    "validation_prompt": "a dog",
    "validation_steps": 2,
    "validation_inference_steps": 2,
    "num_validation_images": 1,
}


def train(settings: dict):
    done = program.run(program.trainer(settings))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def pictures(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in sorted(output.rglob("step-*/*.png"))}


def test_loaded_graphs_give_the_same_bits_and_a_resumed_run_loads_them(world, tmp_path):
    graphs, held_out = tmp_path / "graphs", tmp_path / "held_out"
    write_demo_pictures(held_out, count=1, size=64)
    common = {"compile_cache_dir": graphs, "lora_layers": "single_transformer_blocks.0.attn.to_q"}

    def run(name: str, **changes) -> str:
        changes = {"max_train_steps": 3, "encode_cache_dir": tmp_path / name / "cache", **changes}
        changes["validation_data_dir"] = held_out
        return train(world.settings(tmp_path / name / "out", **HARD, **ROUNDS, **common, **changes))

    first = run("first")
    entries = {path.name for path in graphs.iterdir()}
    # T5, CLIP, the VAE's encoder and decoder, the step, the sampler, the validation loss
    assert "Compiling the training step" in first and len(entries) == 7
    second = run("second")
    assert "Loading the compiled training step" in second and "Compiling" not in second
    assert {path.name for path in graphs.iterdir()} == entries
    for read in (lora_bytes, pictures, lambda output: without_time(metrics(output))):
        assert read(tmp_path / "first" / "out") == read(tmp_path / "second" / "out")
    assert len(pictures(tmp_path / "first" / "out")) == 3
    # more steps are the same graphs
    resumed = run("second", max_train_steps=4, resume_from_checkpoint="latest")
    assert "Loading the compiled training step" in resumed and {path.name for path in graphs.iterdir()} == entries
    # a run that was killed after its last step has none left to compile
    assert "Going on from" in run("second", max_train_steps=4, resume_from_checkpoint="latest")


def test_off_stores_nothing(world, tmp_path):
    words = program.trainer(world.settings(tmp_path / "out", compile_cache="off", max_train_steps=1))
    done = program.run(words, env=program.environment(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Compiling the training step" in done.stderr and not (tmp_path / ".cache" / "flux_db").exists()
    is_on = compile_cache.is_on
    assert is_on("auto", "CPU", {}) and not is_on("auto", "CPU", {compile_cache.ENABLE: "0"})
    # on Ascend nobody has tried it
    assert is_on("on", "Ascend", {}) and not is_on("auto", "Ascend", {})


def test_the_name_depends_on_sources_and_versions(tmp_path):
    shutil.copytree(
        program.ROOT / "flux_db" / "model", tmp_path / "model", ignore=shutil.ignore_patterns("__pycache__")
    )
    before = compile_cache.sources_digest(tmp_path)
    (tmp_path / "model" / "flow.py").write_text("x = 1\n")
    assert compile_cache.sources_digest(tmp_path) != before
    versions = [compile_cache.versions(device.AscendFacts(cann=cann)) for cann in ("8.2", "8.3")]
    assert versions[0] != versions[1] and versions[0]["mindspore"]


def test_the_name_depends_on_variables_that_change_graphs():
    of_launch = {"MS_ROLE": "MS_WORKER", "MS_SCHED_PORT": "8118", "MS_NODE_ID": "1", "PATH": "/bin", "RANK_ID": "1"}
    changing = {"MS_DEV_JIT_SYNTAX_LEVEL": "0", "MS_ENABLE_IO_REUSE": "1"}
    assert compile_cache.variables(of_launch) == {} and compile_cache.variables(of_launch | changing) == changing


def test_a_variable_that_changes_graphs_compiles_anew(world, tmp_path):
    settings = world.settings(tmp_path / "out", max_train_steps=1, compile_cache_dir=tmp_path / "graphs")
    for variables, how in (({}, "Compiling the"), ({}, "Loading the compiled"), ({"MS_DEV_X": "1"}, "Compiling the")):
        done = program.run(program.trainer(settings), env=program.environment(**variables))
        assert done.returncode == 0 and f"{how} training step" in done.stderr, done.stderr[-2000:]


# --- the store -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tmp_path(tmp_path, monkeypatch):
    """A folder, and a process that has stored nothing yet."""
    monkeypatch.setattr(GraphStore, "_own", None)
    monkeypatch.setattr(GraphStore, "_number", 0)
    return tmp_path


def begin_again() -> None:
    """As another process."""
    GraphStore._own, GraphStore._number = None, 0


def compile_something(number: int = 0, *, more: tuple[str, ...] = ()) -> None:
    """What MindSpore leaves in the folder."""
    folder = Path(os.environ[compile_cache.PLACE], "rank_0", "graph_cache")
    folder.mkdir(parents=True, exist_ok=True)
    for name in (f"compile_cache_{number}.mindir", *more):
        (folder / name).write_bytes(b"graph")
    (folder / "compile_dependency.hash").write_text("of no use")


def none() -> list[str]:
    return []


def store_one(root: Path, name: str = "key") -> None:
    begin_again()
    with GraphStore(root, {}).compiling(name, none):
        compile_something()


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_entry_is_whole_or_absent(tmp_path, capsys):
    store = GraphStore(tmp_path, {})
    with pytest.raises(ValueError), store.compiling("key", none):
        compile_something()
        raise ValueError("the compilation fails half-way")
    assert not visible(tmp_path) and compile_cache.ENABLE not in os.environ
    # whether MindSpore has counted that one is not known: this process stores nothing any more
    with store.compiling("key", none):
        assert compile_cache.ENABLE not in os.environ
    begin_again()
    with GraphStore(tmp_path, {}).compiling("key", none):
        pass
    assert not visible(tmp_path) and "did not store" in capsys.readouterr().err


def test_graphs_are_loaded_in_any_order_under_the_next_number(tmp_path):
    store = GraphStore(tmp_path, {})
    for number, name in enumerate(("one", "two")):
        with store.compiling(name, none):
            compile_something(number)
    begin_again()
    later = GraphStore(tmp_path, {})
    for number, name in enumerate(("two", "one", "two")):
        assert later.holds(name)
        with later.compiling(name, none):
            found = list(Path(os.environ[compile_cache.PLACE]).rglob("*.*"))
            assert [path.name for path in found] == [f"compile_cache_{number}.mindir"]
    assert visible(tmp_path) == ["one", "two"]


def test_what_ascends_back_end_stores_is_loaded_under_its_own_number_only(tmp_path):
    with GraphStore(tmp_path, {}).compiling("key", none):
        compile_something(0, more=("backend_compile_cache_0.json",))
    begin_again()
    later = GraphStore(tmp_path, {})
    assert later.holds("key")
    with later.compiling("other", none):
        compile_something()
    assert not later.holds("key")


def test_a_damaged_entry_is_compiled_anew(tmp_path):
    store_one(tmp_path)
    (file,) = tmp_path.rglob("*.mindir")
    file.write_bytes(b"grape")
    assert not GraphStore(tmp_path, {}).holds("key") and not visible(tmp_path)


def test_a_graph_with_hidden_parameters_is_not_stored(tmp_path, capsys):
    with GraphStore(tmp_path, {}).compiling("key", lambda: ["scale_value"]):
        compile_something()
    assert not visible(tmp_path) and "hides parameters: scale_value" in capsys.readouterr().err


def test_a_stored_graph_that_cannot_be_loaded_is_removed(tmp_path):
    store_one(tmp_path)
    with pytest.raises(RunError, match="was removed"), GraphStore(tmp_path, {}).compiling("key", none):
        raise IndexError("MindSpore")
    assert not visible(tmp_path)


def test_old_graphs_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "MOST_KEPT", 2)
    for number in range(3):
        store_one(tmp_path, f"key{number}")
        os.utime(tmp_path / f"key{number}", (number, number))
    store_one(tmp_path, "key3")
    assert visible(tmp_path) == ["key2", "key3"]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with GraphStore(tmp_path / "file" / "graphs", {}).compiling("key", none):
        assert compile_cache.ENABLE not in os.environ
    assert "warning: --compile_cache" in capsys.readouterr().err


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch, capsys):
    store_one(tmp_path)
    begin_again()

    def full(*_):
        raise OSError(28, "No space left on device", "graph")

    monkeypatch.setattr(shutil, "copyfile", full)
    with GraphStore(tmp_path, {}).compiling("key", none):
        assert compile_cache.ENABLE not in os.environ
    assert "No space left" in capsys.readouterr().err and visible(tmp_path) == ["key"]


def test_mindspores_own_switch_is_refused(world, tmp_path):
    done = program.run(
        program.trainer(world.settings(tmp_path / "out")), env=program.environment(**{compile_cache.ENABLE: "1"})
    )
    assert done.returncode == 2 and "MS_COMPILER_CACHE_ENABLE=1" in done.stderr


# --- in MindSpore's compiler -----------------------------------------------------------------------------------------


class Scaled(nn.Cell):
    def __init__(self, factor: float, width: int = 2) -> None:
        super().__init__()
        self.factor = factor
        self.weight = Parameter(Tensor(np.ones((width, width)), ms.float32), name="weight")

    def construct(self, x, *, shift=0.0):
        return ops.matmul(x, self.weight) * self.factor + shift


@pytest.fixture
def graphs(tmp_path_factory, cpu):
    folder = tmp_path_factory.mktemp("graphs")
    compile_cache.use(GraphStore(folder, {}))
    yield folder
    compile_cache.use(None)


def test_a_loaded_graph_gets_the_values_of_the_new_cells_weights(graphs):
    x = Tensor(np.eye(2), ms.float32)
    first = Scaled(2.0)
    assert not compile_cache.is_stored(first, [x])
    assert first(x).asnumpy().tolist() == [[2, 2], [2, 2]] and len(visible(graphs)) == 1
    second = Scaled(2.0)
    second.weight.set_data(Tensor(np.full((2, 2), 5), ms.float32))
    assert compile_cache.is_stored(second, [x])
    assert second(x).asnumpy().tolist() == [[10, 10], [10, 10]] and len(visible(graphs)) == 1
    # another constant, another size, another option: other graphs
    assert Scaled(3.0)(x).asnumpy().tolist() == [[3, 3], [3, 3]]
    assert Scaled(2.0)(Tensor(np.ones((1, 2)), ms.float32)).asnumpy().tolist() == [[4, 4]]
    assert Scaled(2.0)(x, shift=1.0).asnumpy().tolist() == [[3, 3], [3, 3]]
    assert len(visible(graphs)) == 4


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
