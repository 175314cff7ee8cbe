"""Loading: bit for bit what mindone's own from_pretrained gives, in less memory; and parts for several devices."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import program
import pytest
from safetensors.numpy import load_file, save_file
from world import split_weights

from flux_db import weight_file
from flux_db.demo.tiny_model import draw_all, json_bytes
from flux_db.errors import UserError
from flux_db.model.part_weights import choose, open_files
from flux_db.weight_file import WHOLE, Share, open_weights

KINDS = {
    "transformer": "FluxTransformer2DModel",
    "vae": "AutoencoderKL",
    "text_encoder": "CLIPTextModel",
    "text_encoder_2": "T5EncoderModel",
}
LOADERS = {"transformer": "transformer", "vae": "vae", "text_encoder": "clip", "text_encoder_2": "t5"}
# Ties, the smallest numbers and beyond, the largest and beyond.
AWKWARD = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, -(2**-25), 2**-24, 3 * 2**-25, 1e-40, -0.0, 65519.9]
AWKWARD += [65520.0, -7e4, 3.3e38, np.inf, -np.inf, np.nan]


@pytest.fixture
def model(world, tmp_path):
    return Path(shutil.copytree(world.model, tmp_path / "model"))


def weights(model: Path, part: str) -> Path:
    (file,) = (model / part).glob("*.safetensors")
    return file


def load(model: Path, part: str, precision: str, variant: str | None = None):
    from flux_db.model import loading, runtime

    return getattr(loading, f"load_{LOADERS[part]}")(model, runtime.DTYPES[precision], variant)


def load_by_mindone(model: Path, part: str, precision: str, variant: str | None = None):
    import mindone.diffusers
    import mindone.transformers

    from flux_db.model import runtime

    texts = part.startswith("text_encoder")
    library, name = (mindone.transformers, "dtype") if texts else (mindone.diffusers, "mindspore_dtype")
    options = {name: runtime.DTYPES[precision], "variant": variant}
    return getattr(library, KINDS[part]).from_pretrained(str(model / part), **options)


def assert_same(network, expected) -> None:
    found, wanted = dict(network.parameters_and_names()), dict(expected.parameters_and_names())
    assert list(found) == list(wanted)
    for name, parameter in wanted.items():
        ours = found[name]
        assert (ours.name, ours.dtype, ours.shape) == (parameter.name, parameter.dtype, parameter.shape)
        assert ours.asnumpy().tobytes() == parameter.asnumpy().tobytes(), name
        assert not ours.has_init and not ours.requires_grad
    assert str(network.config) == str(expected.config) and network.dtype == expected.dtype


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
@pytest.mark.parametrize("part", KINDS)
def test_every_parameter_is_what_mindone_loads(cpu, world, part, precision):
    network = load(world.model, part, precision)
    assert_same(network, load_by_mindone(world.model, part, precision))
    kept = {str(p.dtype) for name, p in network.parameters_and_names() if ".wo." in name}
    assert part != "text_encoder_2" or (kept == {"Float32"}) == (precision != "bf16")


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("part", KINDS)
def test_so_it_is_from_several_files_and_of_a_variant(cpu, model, part, precision):
    file = weights(model, part)
    tensors = {name: 2 * array for name, array in load_file(file).items()}
    save_file(
        tensors, file.with_name(file.name.replace(".safetensors", ".fp16.safetensors")), metadata={"format": "pt"}
    )
    assert_same(load(model, part, precision, "fp16"), load_by_mindone(model, part, precision, "fp16"))
    split_weights(file, "1.safetensors", "2.safetensors", "3.safetensors")
    assert_same(load(model, part, precision), load_by_mindone(model, part, precision))


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_awkward_numbers_are_rounded_as_mindone_rounds_them(cpu, model, precision):
    file = weights(model, "transformer")
    tensors = load_file(file)
    tensors["proj_out.bias"][: len(AWKWARD)] = AWKWARD
    save_file(tensors, file, metadata={"format": "pt"})
    ours, theirs = (
        network.proj_out.bias.asnumpy().astype(np.float32)
        for network in (load(model, "transformer", precision), load_by_mindone(model, "transformer", precision))
    )
    np.testing.assert_array_equal(ours, theirs)
    assert np.signbit(ours).tolist() == np.signbit(theirs).tolist()


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_files_of_another_type_are_converted(cpu, model, stored, precision):
    file = weights(model, "transformer")
    tensors = {name: array.astype(stored) for name, array in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    numpy_type = {"no": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}[precision]
    for name, parameter in load(model, "transformer", precision).parameters_and_names():
        assert str(parameter.asnumpy().dtype) == np.dtype(numpy_type).name
        assert parameter.asnumpy().tobytes() == tensors[name].astype(numpy_type).tobytes(), name


def test_an_embedding_of_t5_under_both_names_is_read_once(cpu, model):
    file = weights(model, "text_encoder_2")
    tensors = load_file(file)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    network = load(model, "text_encoder_2", "no")
    np.testing.assert_array_equal(network.shared.weight.asnumpy(), tensors["shared.weight"])


# ---- memory and progress ----


def wide_model(model: Path) -> Path:
    """A transformer of 58 MB in float32, in two files."""
    part = model / "transformer"
    settings = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 4, "attention_head_dim": 128}
    config = json.loads((part / "config.json").read_text()) | settings | {"axes_dims_rope": [16, 56, 56]}
    (part / "config.json").write_bytes(json_bytes(config))
    file = weights(model, "transformer")
    file.write_bytes(draw_all("transformer", config, seed=0))
    split_weights(file, "1.safetensors", "2.safetensors")
    return model


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def test_memory_holds_the_model_once_in_its_own_type(cpu, model):
    wide_model(model)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    network = load(model, "transformer", "fp16")
    size = sum(parameter.nbytes for parameter in network.get_parameters())
    assert size > 28e6
    assert status("VmHWM") - before < 1.2 * size + 4e6


def test_a_long_load_shows_how_far_it_is(cpu, world, monkeypatch, capsys):
    from flux_db.model import filling

    load(world.model, "transformer", "no")
    assert "transformer:" not in capsys.readouterr().err
    monkeypatch.setattr(filling, "BAR_AFTER_SECONDS", 0.0)
    load(world.model, "transformer", "no")
    shown = capsys.readouterr().err
    size = sum(entry.end - entry.start for entry in open_weights(weights(world.model, "transformer")).entries.values())
    assert "transformer: 100%" in shown and f"{size / 1e3:.0f}k/" in shown


# ---- parts for several devices ----


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_the_shares_of_a_tensor_are_its_rows(world, count):
    (file,) = open_files(choose(world.model / "transformer", None))
    for name in ("proj_out.weight", "context_embedder.weight", "transformer_blocks.0.norm1.linear.bias"):
        whole = file.read(name)
        parts = [file.read_as(name, np.dtype(np.float16), Share(number, count)) for number in range(count)]
        if whole.shape[0] % count:
            assert all(np.array_equal(part, whole.astype(np.float16)) for part in parts)
        else:
            np.testing.assert_array_equal(np.concatenate(parts), whole.astype(np.float16))
    assert not Share(0, 4).divides((2, 8)) and not Share(0, 3).divides((4,)) and not Share(0, 2).divides(())


def test_a_rank_reads_only_its_part_of_the_files(cpu, model):
    from flux_db.model import loading, runtime

    wide_model(model)
    read = []
    for share in (WHOLE, Share(1, 2)):
        before = bytes_read()
        network = loading.load_transformer(model, runtime.DTYPES["fp16"], None, share)
        read.append(bytes_read() - before)
    assert 58e6 < read[0] < 62e6 and 0.49 < read[1] / read[0] < 0.51
    whole = load(model, "transformer", "fp16")
    for part, parameter in zip(network.get_parameters(), whole.get_parameters(), strict=True):
        expected = parameter.asnumpy()
        is_matrix = expected.ndim == 2
        np.testing.assert_array_equal(part.asnumpy(), expected[len(expected) // 2 :] if is_matrix else expected)
        assert part.sliced == is_matrix


def test_two_ranks_hold_a_part_each_and_compute_what_one_process_does(world, tmp_path):
    """Runs tests/model/sharded_load.py in two processes, which raise if something differs."""
    script = Path(__file__).with_name("sharded_load.py")
    done = program.run([program.PYTHON, str(script), str(world.model), str(tmp_path)])
    logs = [(tmp_path / f"worker_{rank}.log").read_text() for rank in range(2)]
    assert done.returncode == 0, logs
    assert all(log.count("the same") == 1 for log in logs), logs


# ---- files that change ----


def test_a_file_that_becomes_shorter_is_named(world, tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    shutil.copy(weights(world.model, "vae"), path)
    file = open_weights(path)
    name = max(file.entries, key=lambda name: file.entries[name].start)
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr(weight_file, "_PIECE", 3)
    for dtype in (np.float32, np.float16):
        with pytest.raises(UserError, match=f"became shorter while it was read; {name} is cut off"):
            file.read_as(name, np.dtype(dtype))
