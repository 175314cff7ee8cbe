"""LoRAs of another rank, and several as one: the nearest by singular values, as numpy finds them on whole weights."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from flux_db.__main__ import main
from flux_db.lora import lora_file, merge
from flux_db.lora.lora_file import Layer
from flux_db.lora.resize import resize
from flux_db.weight_file import to_bytes

NAMES = ("transformer_blocks.0.attn.to_q", "single_transformer_blocks.3.proj_mlp")


def layer(outputs, inputs, rank, *, alpha=None, seed=0, decay=1.0):
    rng = np.random.default_rng(seed)
    down = rng.standard_normal((rank, inputs)).astype(np.float32) * decay ** np.arange(rank)[:, None]
    up = rng.standard_normal((outputs, rank)).astype(np.float32)
    return Layer(down.astype(np.float32), up, float(alpha or rank))


def nearest(weight, rank):
    left, values, right = np.linalg.svd(weight.astype(np.float64))
    return (left[:, :rank] * values[:rank]) @ right[:rank]


def write(path, layers, alpha=True):
    tensors = {}
    for name, one in layers.items():
        tensors[f"transformer.{name}.lora_A.weight"], tensors[f"transformer.{name}.lora_B.weight"] = one.down, one.up
        if alpha:
            tensors[f"transformer.{name}.alpha"] = np.array(one.alpha, np.float32)
    path.write_bytes(to_bytes(tensors, {"base_model": "somebody/FLUX", "rank": "12"}))
    return path


def test_a_smaller_rank_is_the_nearest_matrix():
    one = layer(40, 24, 12, alpha=6.0, decay=0.7)
    made = resize({NAMES[0]: [(one, 1.0)]}, rank=5)
    exact, found = one.delta(), made.layers[NAMES[0]].delta()
    np.testing.assert_allclose(found, nearest(exact, 5), atol=1e-4)
    assert made.layers[NAMES[0]].rank == 5 and made.layers[NAMES[0]].scale == 1.0
    assert made.error == pytest.approx(np.linalg.norm(exact - found) / np.linalg.norm(exact), rel=1e-3)


def test_the_same_rank_changes_nothing():
    one = layer(40, 24, 12, alpha=3.0)
    made = resize({NAMES[0]: [(one, 1.0)]}, rank=12)
    np.testing.assert_allclose(made.layers[NAMES[0]].delta(), one.delta(), atol=1e-5)
    assert made.error < 1e-7


def test_a_kept_share_decides_each_layers_rank():
    layers = {NAMES[0]: layer(40, 24, 12, decay=0.4), NAMES[1]: layer(40, 24, 12, decay=1.0, seed=1)}
    made = resize({name: [(one, 1.0)] for name, one in layers.items()}, keep=0.95)
    for name, one in layers.items():
        values = np.linalg.svd(one.delta(), compute_uv=False) ** 2
        shares = np.cumsum(values) / values.sum()
        rank = made.layers[name].rank
        assert shares[rank - 1] >= 0.95 > (shares[rank - 2] if rank > 1 else 0.0)
        assert made.layers[name].alpha_dtype  # other ranks in one file: each layer's alpha is in it
    assert made.layers[NAMES[0]].rank < made.layers[NAMES[1]].rank
    assert made.error**2 <= 0.05


def test_several_loras_are_exact_with_the_sum_of_their_ranks():
    a, b = layer(40, 24, 4, alpha=8.0), layer(40, 24, 6, seed=1)
    additions = {NAMES[0]: [(a, 0.7), (b, -0.5)], NAMES[1]: [(a, 0.7)]}
    made = resize(additions, rank=10)
    np.testing.assert_allclose(made.layers[NAMES[0]].delta(), 0.7 * a.delta() - 0.5 * b.delta(), atol=1e-4)
    assert made.layers[NAMES[1]].rank == 4  # no more than there is
    assert made.error < 1e-6
    assert resize(additions, rank=3).error > 0.1


def test_a_lora_of_zeros_stays_one():
    zero = Layer(np.ones((3, 8), np.float32), np.zeros((8, 3), np.float32), 3.0)
    for made in (resize({NAMES[0]: [(zero, 1.0)]}, rank=2), resize({NAMES[0]: [(zero, 1.0)]}, keep=0.9)):
        assert not made.layers[NAMES[0]].delta().any() and made.error == 0.0


def test_the_commands_write_files_that_are_read_again(tmp_path, capsys):
    layers = {NAMES[0]: layer(48, 48, 12, alpha=6.0, decay=0.4), NAMES[1]: layer(48, 12, 12, alpha=6.0, seed=1)}
    source = write(tmp_path / "a.safetensors", layers)
    assert main(["resize", str(source), "--rank", "4", "-o", str(tmp_path / "small.safetensors")]) == 0
    assert "rank 4, relative error 0." in capsys.readouterr().out
    small = lora_file.read(tmp_path / "small.safetensors")
    assert small.metadata["base_model"] == "somebody/FLUX" and small.metadata["rank"] == "4"
    for name, one in layers.items():
        np.testing.assert_allclose(small.layers[name].delta(), nearest(one.delta(), 4), atol=1e-4)
    words = ["merge-loras", f"{source}:0.5", f"{source}:0.25", "--rank", "12", "-o", str(tmp_path / "both.safetensors")]
    assert main(words) == 0
    both = merge.read_all([merge.Weighted(tmp_path / "both.safetensors")])
    np.testing.assert_allclose(both[NAMES[0]][0][0].delta(), 0.75 * layers[NAMES[0]].delta(), atol=1e-4)
    kept = ["resize", str(source), "--keep", "0.9", "-o", str(tmp_path / "kept.safetensors")]
    assert main(kept) == 0
    assert any(name.endswith(".alpha") for name in load_file(tmp_path / "kept.safetensors"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resize", "gone.safetensors", "--rank", "4"], "gone.safetensors: no such file"),
        (["merge-loras", "gone.safetensors:0.5", "--rank", "4"], "gone.safetensors: no such file"),
        (["merge-loras", "gone:x", "--rank", "4"], "x is not a weight"),
        (["resize", "a", "--keep", "1.5"], "must be above 0 and at most 1"),
        (["resize", "a", "--rank", "0"], "must be a whole number from 1"),
        (["resize", "a"], "one of the arguments --rank --keep is required"),
    ],
)
def test_mistakes_are_named(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    try:
        code = main([*words, "-o", "out.safetensors"])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.safetensors").exists()
