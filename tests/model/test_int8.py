"""--base_precision int8: what is quantised, how exactly, and that the network computes with just that."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from mindspore import Tensor
from program import command, run
from safetensors.numpy import load_file, save_file
from world import split_weights

from flux_db.errors import UserError
from flux_db.model import int8, int8_linear, loading
from flux_db.model.int8 import Quantised
from flux_db.model.quantize import quantize
from flux_db.model.runtime import DTYPES
from flux_db.weight_file import Share, open_weights

FULL = DTYPES["no"]


def test_quantisation_is_that_of_the_formula():
    weight = np.random.default_rng(1).standard_normal((40, 30), np.float32) * np.logspace(-4, 1, 40)[:, None]
    weight = weight.astype(np.float32)
    weight[7] = 0
    values, scales = int8.quantise(weight)
    largest = np.abs(weight).max(axis=1)
    assert values.dtype == np.int8 and np.abs(values).max() == 127
    # the scale is max|W| / 127, or up to 1/128 more, and bf16 holds it
    exact = np.delete(scales, 7) / np.delete(largest / 127, 7)
    assert exact.min() >= 1 - 1e-6 and exact.max() <= 1 + 2**-7
    assert (scales.astype(ml_dtypes.bfloat16).astype(np.float32) == scales).all()
    for row in range(40):
        assert (values[row] == np.rint(weight[row].astype(np.float64) / scales[row])).all()
    error = np.abs(int8.dequantise(Quantised(values, scales)) - weight)
    assert (error <= scales[:, None] * 0.5000001).all() and (error[7] == 0).all()


def test_a_file_is_quantised_piece_by_piece_and_a_share_of_it_the_same(tmp_path, monkeypatch):
    weight = np.random.default_rng(2).standard_normal((12, 50), np.float32)
    save_file({"w.weight": weight.astype(ml_dtypes.bfloat16)}, tmp_path / "a.safetensors")
    file = open_weights(tmp_path / "a.safetensors")
    monkeypatch.setattr(int8, "_PIECE", 150)  # three rows
    whole = int8.read_quantised(file, "w.weight")
    wanted = int8.quantise(weight.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert (whole.values == wanted.values).all() and (whole.scales == wanted.scales).all()
    part = int8.read_quantised(file, "w.weight", Share(1, 2))
    assert (part.values == wanted.values[6:]).all() and (part.scales == wanted.scales[6:]).all()


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    save_file({"w.weight": np.full((2, 2), np.nan, np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"w\.weight holds NaN or infinity"):
        int8.read_quantised(open_weights(tmp_path / "a.safetensors"), "w.weight")


KEPT = ("x_embedder", "context_embedder", "time_text_embed", "norm_out", "proj_out")


@pytest.fixture(scope="module")
def loaded(world):
    return loading.load_transformer(world.model, FULL, is_int8=True)


def test_matrices_of_the_blocks_are_int8_and_nothing_else(loaded, world):
    types = {name: str(p.dtype) for name, p in loaded.parameters_and_names()}
    stored = load_file(world.model / "transformer" / "diffusion_pytorch_model.safetensors")
    matrices = {name for name, value in stored.items() if value.ndim == 2 and not name.startswith(KEPT)}
    assert {name for name, kind in types.items() if kind == "Int8"} == matrices
    assert set(types) - set(stored) == {f"{name}_scale" for name in matrices}
    assert not [p.name for p in loaded.get_parameters() if p.requires_grad]


def inputs(transformer, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    c = transformer.config
    return {
        "hidden_states": Tensor(draw((1, 4, c.in_channels)).astype(np.float32)),
        "encoder_hidden_states": Tensor(draw((1, 3, c.joint_attention_dim)).astype(np.float32)),
        "pooled_projections": Tensor(draw((1, c.pooled_projection_dim)).astype(np.float32)),
        "timestep": Tensor(np.array([0.7], np.float32)),
        "guidance": Tensor(np.array([1.0], np.float32)) if c.guidance_embeds else None,
        "img_ids": Tensor(np.zeros((4, 3), np.float32)),
        "txt_ids": Tensor(np.zeros((3, 3), np.float32)),
        "return_dict": False,
    }


def answer(transformer):
    return transformer(**inputs(transformer))[0].asnumpy()


def test_the_network_answers_as_one_with_the_rounded_matrices(loaded, world):
    rounded = loading.load_transformer(world.model, FULL)
    before = answer(loading.load_transformer(world.model, FULL))
    for name, parameter in rounded.parameters_and_names():
        if int8.is_matrix(name, parameter.shape):
            value = int8.dequantise(int8.quantise(parameter.asnumpy()))
            parameter.set_data(Tensor(value))
    given, wanted = answer(loaded), answer(rounded)
    assert np.abs(given - wanted).max() <= 1e-5 * np.abs(wanted).max()
    change = np.sqrt(np.mean((given - before) ** 2) / np.mean(before**2))
    assert 1e-5 < change < 0.05


def test_a_stored_int8_model_is_loaded_as_it_is(loaded, world, tmp_path):
    done = run(command("quantize", world.model, "-o", tmp_path / "small"))
    assert done.returncode == 0, done.stderr
    stored = loading.load_transformer(tmp_path / "small", FULL, is_int8=True)
    theirs = dict(stored.parameters_and_names())
    for name, parameter in loaded.parameters_and_names():
        assert parameter.dtype == theirs[name].dtype
        assert (parameter.asnumpy() == theirs[name].asnumpy()).all(), name
    file = "transformer/diffusion_pytorch_model.safetensors"
    old, new = (load_file(model / file) for model in (world.model, tmp_path / "small"))
    assert {name: value.nbytes for name, value in new.items() if value.dtype == np.int8} == {
        name: value.nbytes // 4 for name, value in old.items() if int8.is_matrix(name, value.shape)
    }
    with pytest.raises(UserError, match="add --base_precision int8"):
        loading.load_transformer(tmp_path / "small", FULL)
    again = run(command("quantize", tmp_path / "small", "-o", tmp_path / "smaller"))
    assert again.returncode == 2 and "stored as int8 already" in again.stderr
    assert not (tmp_path / "smaller").exists()


def test_a_stored_model_of_several_files_keeps_them(whole_world, tmp_path):
    shutil.copytree(whole_world.model, tmp_path / "model")
    file = tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    names = [f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    split_weights(file, *names)
    quantize(tmp_path / "model", tmp_path / "small")
    index = json.loads((tmp_path / "small/transformer/diffusion_pytorch_model.safetensors.index.json").read_text())
    held = {name: load_file(tmp_path / "small" / "transformer" / name) for name in names}
    assert index["weight_map"] == {tensor: name for name, tensors in held.items() for tensor in tensors}
    assert index["metadata"]["total_size"] == sum(a.nbytes for tensors in held.values() for a in tensors.values())
    loading.load_transformer(tmp_path / "small", FULL, is_int8=True)


def test_a_lora_beside_an_int8_layer_adds_its_product(world):
    transformer = loading.load_transformer(world.model, FULL, is_int8=True)
    layer = int8_linear.layers(transformer)["transformer_blocks.0.attn.to_q"]
    draw = np.random.default_rng(5).standard_normal
    x = draw((2, layer.in_features)).astype(np.float32)
    down, up = draw((3, layer.in_features)).astype(np.float32), draw((layer.out_features, 3)).astype(np.float32)
    matrix = int8.dequantise(Quantised(layer.weight.asnumpy(), layer.weight_scale.asnumpy()))
    int8_linear.add_beside(layer, down, up, FULL)
    wanted = x @ (matrix + up @ down).T + layer.bias.asnumpy()
    assert np.abs(layer(Tensor(x)).asnumpy() - wanted).max() <= 1e-4 * np.abs(wanted).max()
