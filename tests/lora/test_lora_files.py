"""LoRA files: the names of the other programs, conversion without loss, and what `info` says. All in numpy."""

import json
import math
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from flux_db.__main__ import main
from flux_db.errors import UserError
from flux_db.lora import convert, describe, layer_names, lora_file
from flux_db.lora import trained_file as trained
from flux_db.model import identity
from flux_db.settings.schema import DEFAULT_LAYERS, from_flat_dict
from flux_db.weight_file import open_weights, to_bytes

WIDTH, RANK = 24, 4

# Outputs and inputs of every kind of layer, in widths.
DOUBLE = {
    "attn.to_q": (1, 1), "attn.to_k": (1, 1), "attn.to_v": (1, 1), "attn.to_out.0": (1, 1),
    "attn.add_q_proj": (1, 1), "attn.add_k_proj": (1, 1), "attn.add_v_proj": (1, 1), "attn.to_add_out": (1, 1),
    "ff.net.0.proj": (4, 1), "ff.net.2": (1, 4), "ff_context.net.0.proj": (4, 1), "ff_context.net.2": (1, 4),
    "norm1.linear": (6, 1), "norm1_context.linear": (6, 1),
}  # fmt: skip
SINGLE = {
    "attn.to_q": (1, 1), "attn.to_k": (1, 1), "attn.to_v": (1, 1), "proj_mlp": (4, 1), "proj_out": (1, 5),
    "norm.linear": (3, 1),
}  # fmt: skip
OUTSIDE = {
    "x_embedder": (1, 2), "context_embedder": (1, 3), "proj_out": (2, 1), "norm_out.linear": (2, 1),
    **{f"time_text_embed.{e}_embedder.linear_{n}": (1, 1) for e in ("timestep", "text", "guidance") for n in (1, 2)},
}  # fmt: skip
SHAPES = {
    **{f"transformer_blocks.{i}.{name}": shape for i in (0, 11) for name, shape in DOUBLE.items()},
    **{f"single_transformer_blocks.{i}.{name}": shape for i in (0, 37) for name, shape in SINGLE.items()},
    **OUTSIDE,
}


def matrices(modules, *, width=WIDTH, rank=RANK, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    tensors = {}
    for module in modules:
        outputs, inputs = (n * width for n in SHAPES[module])
        tensors[f"transformer.{module}.lora_A.weight"] = rng.standard_normal((rank, inputs)).astype(dtype)
        tensors[f"transformer.{module}.lora_B.weight"] = rng.standard_normal((outputs, rank)).astype(dtype)
    return tensors


def with_alpha(tensors, alpha, dtype=np.float32):
    modules = {name.rsplit(".", 2)[0] for name in tensors}
    return {**tensors, **{f"{module}.alpha": np.array(alpha, dtype) for module in modules}}


def write(path, tensors, metadata=None):
    path.write_bytes(to_bytes(tensors, metadata or {}))
    return path


def converted(source, format_, target):
    return write(target, *convert.convert(lora_file.read(source), format_))


def equal(a, b):
    a, b = load_file(a), load_file(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert a[name].tobytes() == b[name].tobytes(), name
    return True


def deltas(path):
    return {name: layer.delta() for name, layer in convert.parts(lora_file.read(path)).items()}


# ---- Names ----


def test_kohya_names_and_shapes_are_the_published_ones(tmp_path):
    """As sd-scripts lists them for FLUX.1 at the head of networks/convert_flux_lora.py; rank 4 on every projection."""
    modules = [
        m for m in SHAPES if ".0." in m and m.startswith(("transformer_blocks.0.", "single_transformer_blocks.0."))
    ]
    source = write(tmp_path / "d", matrices(modules, width=3072, rank=4))
    entries = open_weights(converted(source, "kohya", tmp_path / "k")).entries
    published = {
        "lora_unet_double_blocks_0_img_attn_proj": (4, 3072, 3072),
        "lora_unet_double_blocks_0_img_attn_qkv": (12, 3072, 9216),
        "lora_unet_double_blocks_0_img_mlp_0": (4, 3072, 12288),
        "lora_unet_double_blocks_0_img_mlp_2": (4, 12288, 3072),
        "lora_unet_double_blocks_0_img_mod_lin": (4, 3072, 18432),
        "lora_unet_double_blocks_0_txt_attn_proj": (4, 3072, 3072),
        "lora_unet_double_blocks_0_txt_attn_qkv": (12, 3072, 9216),
        "lora_unet_double_blocks_0_txt_mlp_0": (4, 3072, 12288),
        "lora_unet_double_blocks_0_txt_mlp_2": (4, 12288, 3072),
        "lora_unet_double_blocks_0_txt_mod_lin": (4, 3072, 18432),
        "lora_unet_single_blocks_0_linear1": (16, 3072, 21504),
        "lora_unet_single_blocks_0_linear2": (4, 15360, 3072),
        "lora_unet_single_blocks_0_modulation_lin": (4, 3072, 9216),
    }
    wanted = {}
    for name, (rank, inputs, outputs) in published.items():
        wanted |= {f"{name}.lora_down.weight": (rank, inputs), f"{name}.lora_up.weight": (outputs, rank)}
        wanted[f"{name}.alpha"] = ()
    assert {name: entry.shape for name, entry in entries.items()} == wanted


def test_comfyui_names_are_those_of_its_model(tmp_path):
    """`diffusion_model.` and the layer's name in the model: what ComfyUI calls its generic format."""
    source = write(tmp_path / "d", matrices(SHAPES))
    names = {
        name.rsplit(".lora_", 1)[0].removesuffix(".alpha")
        for name in load_file(converted(source, "comfyui", tmp_path / "c"))
    }
    blocks = [
        *(f"double_blocks.{i}.{s}_{n}" for i in (0, 11) for s in ("img", "txt")
          for n in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2", "mod.lin")),
        *(f"single_blocks.{i}.{n}" for i in (0, 37) for n in ("linear1", "linear2", "modulation.lin")),
    ]  # fmt: skip
    outside = [
        "img_in", "txt_in", "time_in.in_layer", "time_in.out_layer", "vector_in.in_layer", "vector_in.out_layer",
        "guidance_in.in_layer", "guidance_in.out_layer", "final_layer.adaLN_modulation.1", "final_layer.linear",
    ]  # fmt: skip
    assert names == {f"diffusion_model.{name}" for name in (*blocks, *outside)}


@pytest.mark.parametrize("module", SHAPES)
def test_names_lead_there_and_back(module):
    fused = layer_names.fused_of(module)
    assert module in layer_names.parts_of(fused)
    for name in (module, fused):
        assert layer_names.with_dots(name.replace(".", "_")) == name


# ---- Without loss ----

DEFAULTS = [m for m in SHAPES if m.endswith(tuple(f".{layer}" for layer in DEFAULT_LAYERS))]


def adapter(modules, **changes):
    """What diffusers writes of peft's settings."""
    settings = {"r": RANK, "lora_alpha": RANK, "target_modules": modules, "rank_pattern": {}, "alpha_pattern": {}}
    text = json.dumps({f"transformer.{name}": value for name, value in (settings | changes).items()})
    return {"lora_adapter_metadata": text, "rank": "4"}


FILES = {
    "every layer": (matrices(SHAPES), adapter(list(SHAPES))),
    "default layers, bf16": (matrices(DEFAULTS, dtype=ml_dtypes.bfloat16), adapter(list(DEFAULT_LAYERS))),
    "default layers, fp16": (matrices(DEFAULTS, dtype=np.float16), {}),
    "alpha is not the rank": (with_alpha(matrices(DEFAULTS), 0.1), {}),
    "alpha in bf16": (with_alpha(matrices(DEFAULTS), 7, ml_dtypes.bfloat16), {}),
    "alpha in the metadata": (matrices(DEFAULTS), adapter(DEFAULTS, lora_alpha=9)),
    "one projection": (matrices(["transformer_blocks.0.attn.to_k", "single_transformer_blocks.0.proj_mlp"]), {}),
    "never trained": ({n: np.zeros_like(v) if "lora_B" in n else v for n, v in matrices(DEFAULTS).items()}, {}),
    "all zero": ({n: np.zeros_like(v) for n, v in matrices(DEFAULTS, rank=3).items()}, {}),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "way", [("kohya",), ("comfyui",), ("kohya", "comfyui"), ("comfyui", "kohya", "kohya")], ids="-".join
)
def test_round_trip_gives_the_same_file(tmp_path, name, way):
    source = write(tmp_path / "start", FILES[name][0], {"format": "pt", **FILES[name][1]})
    last = source
    for number, format_ in enumerate(way):
        last = converted(last, format_, tmp_path / str(number))
        strengths = deltas(last)
        for module, delta in deltas(source).items():
            assert np.array_equal(strengths[module], delta), "the same strength on the way"
    back = converted(last, "diffusers", tmp_path / "back")
    assert equal(source, back)
    assert source.read_bytes() == back.read_bytes(), "header and all"


@pytest.mark.parametrize("modules", [DEFAULTS, list(SHAPES)], ids=["default layers", "every layer"])
def test_the_way_back_without_our_notes(tmp_path, modules):
    """kohya's own converter leaves no notes: the diagonal is recognised by its zeros."""
    source = write(tmp_path / "d", with_alpha(matrices(modules), 8.0))
    middle = converted(source, "kohya", tmp_path / "k")
    bare = write(tmp_path / "bare", load_file(middle))
    assert equal(source, converted(bare, "diffusers", tmp_path / "back"))


@pytest.mark.parametrize("rank", [5, 12])
def test_a_truly_fused_lora_and_back(tmp_path, rank):
    """One LoRA over q, k and v: each part gets the whole down matrix and its own rows of the up matrix."""
    rng = np.random.default_rng(1)
    tensors = {}
    for name, outputs in (("double_blocks_3_img_attn_qkv", 3), ("single_blocks_2_linear1", 7)):
        tensors[f"lora_unet_{name}.lora_down.weight"] = rng.standard_normal((rank, WIDTH)).astype(np.float16)
        tensors[f"lora_unet_{name}.lora_up.weight"] = rng.standard_normal((outputs * WIDTH, rank)).astype(np.float16)
        tensors[f"lora_unet_{name}.alpha"] = np.array(2.3, np.float16)
    source = write(tmp_path / "k", tensors, {"ss_network_dim": str(rank)})
    middle = converted(source, "diffusers", tmp_path / "d")
    parts = load_file(middle)
    up, down = (tensors[f"lora_unet_single_blocks_2_linear1.lora_{side}.weight"] for side in ("up", "down"))
    for number, (part, end) in enumerate({"attn.to_q": 1, "attn.to_k": 2, "attn.to_v": 3, "proj_mlp": 7}.items()):
        key = f"transformer.single_transformer_blocks.2.{part}"
        assert np.array_equal(parts[f"{key}.lora_A.weight"], down)
        assert np.array_equal(parts[f"{key}.lora_B.weight"], up[number * WIDTH : end * WIDTH])
        assert parts[f"{key}.alpha"] == np.float16(2.3)
    assert equal(source, converted(middle, "kohya", tmp_path / "back"))


def test_scale_and_shift_change_places_in_the_last_layer(tmp_path):
    source = matrices(["norm_out.linear"])
    path = converted(write(tmp_path / "d", source), "comfyui", tmp_path / "c")
    up = source["transformer.norm_out.linear.lora_B.weight"]
    tensors = load_file(path)
    name = "diffusion_model.final_layer.adaLN_modulation.1"
    assert np.array_equal(tensors[f"{name}.lora_up.weight"], np.concatenate([up[WIDTH:], up[:WIDTH]]))
    assert np.array_equal(tensors[f"{name}.lora_down.weight"], source["transformer.norm_out.linear.lora_A.weight"])


def test_what_a_fused_layer_cannot_hold_is_refused_by_name(tmp_path):
    tensors = with_alpha(matrices(["transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k"]), 4.0)
    tensors["transformer.transformer_blocks.0.attn.to_k.alpha"] = np.array(2.0, np.float32)
    with pytest.raises(UserError, match=r"transformer_blocks.0.attn.to_k, .*to_q.*different strengths"):
        convert.convert(lora_file.read(write(tmp_path / "d", tensors)), "kohya")


# ---- Files that somebody edited ----


def as_diffusers_reads(path):
    """Layer -> (rank, strength), by the rules of diffusers 0.35; an AssertionError where it rejects the file."""
    tensors, metadata = load_file(path), open_weights(path).metadata
    alphas = {name: value for name, value in tensors.items() if "alpha" in name}
    assert all(np.issubdtype(value.dtype, np.floating) for value in alphas.values()), "alphas are floats"
    told = json.loads(metadata["lora_adapter_metadata"]) if "lora_adapter_metadata" in metadata else None
    assert not (alphas and told), "`network_alphas` and `metadata` cannot be specified both at the same time"
    modules = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    ranks = {module: tensors[f"{module}.lora_B.weight"].shape[1] for module in modules}
    if told is None:  # every alpha, or none: without its own a layer would get another's
        assert len(alphas) in (0, len(modules))
        return {m: (ranks[m], float(alphas.get(f"{m}.alpha", ranks[m])) / ranks[m]) for m in modules}
    told = {name.removeprefix("transformer."): value for name, value in told.items()}
    found = {}
    for module in modules:
        name = module.removeprefix("transformer.")
        assert any(name == target or name.endswith(f".{target}") for target in told["target_modules"]), "not loaded"
        rank, alpha = (
            next((value for p, value in told[patterns].items() if re.match(rf"(.*\.)?({p})$", name)), told[default])
            for patterns, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
        )
        assert rank == ranks[module], f"size mismatch for {name}"
        found[module] = (rank, alpha / rank)
    modules = {module.removeprefix("transformer.") for module in modules}
    assert all(any(f".{m}".endswith(f".{t}") for m in modules) for t in told["target_modules"]), "missing keys"
    return found


def trained_file(path, alpha=None):
    """As the trainer writes it; with this alpha in the metadata."""
    config = from_flat_dict({"pretrained_model_name_or_path": "x", **SETTINGS})
    data = trained.lora_file(matrices(DEFAULTS), config, FACTS)
    path.write_bytes(data)
    if alpha is not None:
        metadata = open_weights(path).metadata
        settings = json.loads(metadata["lora_adapter_metadata"]) | {"transformer.lora_alpha": alpha}
        write(path, load_file(path), metadata | {"lora_adapter_metadata": json.dumps(settings)})
    return path


def resized(tensors, rank):
    """Every layer with this rank, as kohya's resize_lora.py leaves it, with the same strength."""
    result = {}
    for key, value in tensors.items():
        if key.endswith("lora_down.weight"):
            module = key.removesuffix(".lora_down.weight")
            up, old = tensors[f"{module}.lora_up.weight"], value.shape[0]
            u, s, v = np.linalg.svd(up @ value, full_matrices=False)
            result[f"{module}.lora_up.weight"] = np.ascontiguousarray(u[:, :rank] * s[:rank])
            result[key] = np.ascontiguousarray(v[:rank])
            result[f"{module}.alpha"] = np.array(tensors[f"{module}.alpha"] / old * rank, np.float32)
    return result


def cut_diagonal(tensors):
    """Every part of a fused layer with rank 2 instead of 4, on the diagonal as before."""
    result = {}
    for key, value in tensors.items():
        rank = tensors[f"{key.split('.')[0]}.lora_down.weight"].shape[0]
        kept = np.arange(rank) % 4 < 2
        result[key] = value / 2 if key.endswith(".alpha") else value[kept] if "down" in key else value[:, kept]
    return {key: np.ascontiguousarray(value) for key, value in result.items()}


def halved(tensors):
    return {key: np.array(value / 2, np.float32) if key.endswith(".alpha") else value for key, value in tensors.items()}


EDITS = {
    "not at all": lambda tensors: tensors,
    "other rank": lambda tensors: resized(tensors, 3),
    "other rank, on the diagonal": cut_diagonal,
    "other rank of one layer": lambda tensors: {
        **tensors,
        **resized({key: value for key, value in tensors.items() if "linear2" not in key and "blocks_0_" in key}, 2),
    },
    "layers removed": lambda tensors: {key: value for key, value in tensors.items() if "_0_" in key},
    "other strength": halved,
    "no alphas": lambda tensors: {key: value for key, value in tensors.items() if not key.endswith(".alpha")},
    "alphas in whole numbers": lambda tensors: {
        key: value.astype(np.int64) if key.endswith(".alpha") else value for key, value in tensors.items()
    },
}


@pytest.mark.parametrize("alpha", [None, 9])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_kohya_file_comes_back_as_one_that_diffusers_reads(tmp_path, edit, alpha):
    source = trained_file(tmp_path / "start", alpha)
    assert set(as_diffusers_reads(source).values()) == {(RANK, (alpha or RANK) / RANK)}
    middle = converted(source, "kohya", tmp_path / "k")
    write(tmp_path / "edited", EDITS[edit](load_file(middle)), open_weights(middle).metadata)
    strengths = deltas(tmp_path / "edited")
    back = converted(tmp_path / "edited", "diffusers", tmp_path / "back")
    read_there = as_diffusers_reads(back)
    tensors = load_file(back)
    assert {module.removeprefix("transformer.") for module in read_there} == set(strengths)
    for module, (_, strength) in read_there.items():
        delta = strength * (tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"])
        assert delta == pytest.approx(strengths[module.removeprefix("transformer.")], abs=1e-4), "the same there"
    if edit == "not at all":
        assert back.read_bytes() == source.read_bytes()
    elif edit == "other rank, on the diagonal":
        assert {rank for rank, _ in read_there.values()} == {2}, "parts keep matrices of their own"
    again = converted(back, "kohya", tmp_path / "again")
    for name, delta in deltas(again).items():
        assert delta == pytest.approx(strengths[name], abs=1e-4)


def test_settings_that_are_not_enough_for_diffusers_are_replaced(tmp_path):
    """Without r and target_modules it takes peft's defaults or fails: so alphas are written, which all loaders read."""
    told = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 9})}
    source = write(tmp_path / "d", matrices(DEFAULTS), told)
    back = converted(source, "diffusers", tmp_path / "back")
    assert set(as_diffusers_reads(back).values()) == {(RANK, 9 / RANK)}


@pytest.mark.parametrize(
    "note",
    [
        "{", "[]", "[" * 10**5, '{"layers": []}', '{"layers": {"x": 1}, "metadata": {}}',
        '{"layers": {"x": ["4", 1, null]}, "metadata": {}}', '{"layers": {"x": [4, 1e400, null]}, "metadata": {}}',
        '{"layers": {"transformer_blocks.0.attn.to_q": [-4, 4, "F32"], "transformer_blocks.0.attn.to_k": [16, 16, '
        '"F32"]}, "metadata": {}}',
        '{"layers": {"x": [4, 4, "BOOL"]}, "metadata": {}}', '{"layers": {}, "metadata": {"format": 1, "rank": "x"}}',
        '{"layers": {}, "metadata": {"lora_adapter_metadata": "{\\"transformer.r\\": 99}"}}',
    ],
)  # fmt: skip
def test_a_note_that_is_not_ours_changes_nothing(tmp_path, note):
    source = write(tmp_path / "d", matrices(DEFAULTS))
    middle = converted(source, "kohya", tmp_path / "k")
    bare = write(tmp_path / "bare", load_file(middle))
    noted = write(tmp_path / "noted", load_file(middle), {"flux_db_parts": note, "rank": "4"})
    files = [converted(path, "diffusers", tmp_path / f"{path.name}.back") for path in (bare, noted)]
    assert equal(*files)
    metadata = open_weights(files[1]).metadata
    assert metadata["rank"] == "4" and metadata["format"] == "pt" and "lora_adapter_metadata" not in metadata


@pytest.mark.parametrize(("dtype", "alpha"), [(np.float16, 40_000), (np.int8, 100)])
def test_an_alpha_that_outgrows_its_type_is_written_in_another(tmp_path, dtype, alpha):
    source = write(tmp_path / "d", with_alpha(matrices(DEFAULTS), alpha, dtype))
    middle = converted(source, "kohya", tmp_path / "k")
    assert load_file(middle)["lora_unet_double_blocks_0_img_attn_qkv.alpha"] == 3 * alpha
    assert deltas(middle).keys() == deltas(source).keys()
    for name, delta in deltas(source).items():
        assert np.array_equal(deltas(middle)[name], delta)
    as_diffusers_reads(converted(middle, "diffusers", tmp_path / "back"))


# ---- Formats of others ----

FOREIGN = {
    "peft": "base_model.model.{}.lora_A.weight",
    "onetrainer": "lora_transformer_{}.lora_down.weight",
    "without prefix": "{}.lora_A.default.weight",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_formats_are_read(tmp_path, name):
    tensors = {}
    for key, value in matrices(DEFAULTS).items():
        module, side = key.removeprefix("transformer.").removesuffix(".weight").rsplit(".", 1)
        module = module.replace(".", "_") if name == "onetrainer" else module
        form = FOREIGN[name] if side == "lora_A" else FOREIGN[name].replace("_A", "_B").replace("down", "up")
        tensors[form.format(module)] = value
    file = lora_file.read(write(tmp_path / "x.safetensors", tensors))
    assert file.format == name
    assert equal(
        write(tmp_path / "y", convert.convert(file, "diffusers")[0]), write(tmp_path / "z", matrices(DEFAULTS))
    )


def test_peft_keeps_alpha_in_a_file_of_its_own(tmp_path):
    tensors = {k.replace("transformer.", "base_model.model.", 1): v for k, v in matrices(DEFAULTS).items()}
    write(tmp_path / "adapter_model.safetensors", tensors)
    settings = {"r": RANK, "lora_alpha": 6, "alpha_pattern": {"attn.to_q": 2}, "use_rslora": False}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    layers = lora_file.read(tmp_path).layers
    assert {name.endswith("attn.to_q"): layer.alpha for name, layer in layers.items()} == {True: 2, False: 6}


# ---- info and errors ----


def test_norms_are_those_of_the_whole_matrix():
    rng = np.random.default_rng(2)
    layer = lora_file.Layer(rng.standard_normal((4, 30)), rng.standard_normal((50, 4)), alpha=10.0)
    assert describe.norm(layer) == pytest.approx(np.linalg.norm(layer.up @ layer.down * 2.5), rel=1e-6)
    broken = lora_file.Layer(np.full((4, 30), np.inf), layer.up, alpha=4.0)
    assert math.isnan(describe.norm(broken))


def test_info_tells_format_rank_alpha_layers_and_metadata(tmp_path, capsys):
    path = write(
        tmp_path / "x.safetensors",
        with_alpha(matrices(DEFAULTS, dtype=np.float16), 2.0),
        {"base_model": "B", "note": "n"},
    )
    assert main(["info", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for part in (
        "diffusers",
        "rank      4",
        "alpha     2; strength alpha / rank: 0.5",
        "float16",
        "base_model: B",
        "2 double and 2 single",
    ):
        assert part in text, text
    assert main(["export", str(path), "--format", "kohya", "-o", str(tmp_path / "k.safetensors")]) == 0
    assert main(["info", str(tmp_path / "k.safetensors")]) == 0
    text = capsys.readouterr().out
    for part in ("kohya", "4 (12 layers), 12 (6 layers)", "alpha / rank: 0.5", "double_blocks.*.img_attn.qkv"):
        assert part in text, text


def test_info_knows_a_lora_of_another_network(tmp_path, capsys):
    key = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    tensors = {
        f"{key}.lora_down.weight": np.ones((4, 8, 3, 3), np.float32),
        f"{key}.lora_up.weight": np.ones((8, 4, 1, 1), np.float32),
    }
    path = write(tmp_path / "sd.safetensors", tensors)
    assert main(["info", str(path)]) == 0
    assert "not for FLUX.1" in capsys.readouterr().out
    assert main(["export", str(path), "--format", "diffusers", "-o", str(tmp_path / "y")]) == 2
    assert "is not a LoRA for FLUX.1 that can be read" in capsys.readouterr().err
    mixed = write(
        tmp_path / "te.safetensors", {**matrices(DEFAULTS), "lora_te1_x.lora_down.weight": np.ones((2, 2), np.float32)}
    )
    assert main(["export", str(mixed), "--format", "kohya", "-o", str(tmp_path / "y")]) == 2
    assert "would be lost: lora_te1_x.lora_down.weight" in capsys.readouterr().err


def test_layers_of_text_encoders_are_left_out_of_drawing_but_not_silently(tmp_path, capfd):
    te = {f"lora_te1_x.lora_{side}.weight": np.ones((2, 2), np.float32) for side in ("down", "up")}
    file = lora_file.read(write(tmp_path / "te.safetensors", {**matrices(DEFAULTS), **te}))
    assert set(convert.parts(file)) == set(DEFAULTS)
    assert "1 layers of text encoders are not used" in capfd.readouterr().err
    with pytest.raises(UserError, match="would be lost: lora_te1_x"):
        convert.convert(file, "kohya")


def test_info_knows_other_kinds_than_plain_lora(tmp_path, capsys):
    key = "lora_unet_double_blocks_0_img_attn_qkv"
    path = write(tmp_path / "lokr.safetensors", {f"{key}.lokr_w1": np.ones((4, 4), np.float32)}, {"author": "x"})
    assert main(["info", str(path)]) == 0
    text = capsys.readouterr().out
    assert "no plain LoRA" in text and f"{key}.lokr_w1" in text and "author: x" in text
    assert main(["export", str(path), "--format", "diffusers", "-o", str(tmp_path / "y")]) == 2
    assert f"it holds {key}.lokr_w1" in capsys.readouterr().err


def damage(path, kind):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes(
        {
            "empty": b"",
            "text": b"hello, I am a text file and no weights",
            "cut header": data[: length // 2],
            "cut tensor": data[:-5],
            "bad header": data[:8] + b"{" + b"x" * (length - 1) + data[8 + length :],
        }[kind]
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", "not a safetensors"),
        ("text", "not a safetensors"),
        ("cut header", "cut off"),
        ("cut tensor", "cut off in the middle of"),
        ("bad header", "header is damaged"),
    ],
)
def test_a_damaged_file_is_told(tmp_path, capsys, kind, message):
    path = write(tmp_path / "x.safetensors", matrices(DEFAULTS))
    damage(path, kind)
    assert main(["info", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error and str(path) in error


def test_no_lora_and_no_file_are_told(tmp_path, capsys):
    save_file({"a.weight": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    for words, message in (
        (["info", str(tmp_path)], "is not a LoRA; it holds 1 tensors: a.weight"),
        (["info", str(tmp_path / "nothing")], "no such file"),
        (["export", str(tmp_path / "nothing"), "--format", "kohya", "-o", "x"], "no such file"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["info", str(tmp_path / "empty")]) == 2
    assert "no safetensors file" in capsys.readouterr().err
    path = write(tmp_path / "lora", matrices(DEFAULTS))
    assert main(["export", str(path), "--format", "kohya", "-o", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err


# ---- Metadata of a trained file ----

SETTINGS = {
    "instance_data_dir": "/secret/pictures",
    "instance_prompt": "a photo of sks dog",
    "rank": 4,
    "output_dir": "/secret/out",
}
FACTS = trained.Facts(steps=60, pictures=5, global_batch=2)


def told(**changes):
    config = from_flat_dict({"pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev", **SETTINGS, **changes})
    return trained.about(config, FACTS)


def test_metadata_of_a_run():
    metadata = told(lora_alpha=2.0, resolution=512, encode_cache_dir="/secret/cache")
    wanted = {
        "base_model": "black-forest-labs/FLUX.1-dev", "instance_prompt": "a photo of sks dog", "rank": "4",
        "alpha": "2.0", "steps": "60", "resolution": "512", "pictures": "5",
        "ss_network_dim": "4", "ss_base_model_version": "flux1", "modelspec.architecture": "flux-1-dev/lora",
    }  # fmt: skip
    assert wanted.items() <= metadata.items()
    assert "secret" not in json.dumps(metadata)


def test_the_hash_of_the_settings_follows_what_decides_the_result():
    start = told()["config_hash"]
    places = {
        "output_dir": "/elsewhere",
        "instance_data_dir": "/moved",
        "validation_prompt": ["x"],
        "encode_cache_dir": "/c",
    }
    assert told(**places)["config_hash"] == start
    assert told(train_batch_size=2)["config_hash"] == start, "the global batch counts, not how it is dealt"
    assert (
        len({start, *(told(**change)["config_hash"] for change in ({"rank": 8}, {"seed": 1}, {"learning_rate": 1e-3}))})
        == 4
    )


@pytest.mark.parametrize(
    ("path", "index", "name"),
    [
        ("my/FLUX.1-dev", {}, "black-forest-labs/FLUX.1-dev"),
        ("hub/models--owner--Tuned.1/snapshots/0123abcd", {}, "owner/Tuned.1"),
        ("my/model", {"_name_or_path": "owner/Tuned"}, "owner/Tuned"),
        ("my/model", {"_name_or_path": "/home/me/models/Tuned"}, "model"),
        ("my/model", {}, "model"),
    ],
)
def test_the_base_model_has_a_name_and_never_a_path(tmp_path, path, index, name):
    (tmp_path / path).mkdir(parents=True)
    (tmp_path / path / "model_index.json").write_text(json.dumps(index))
    assert identity.base_model_name(str(tmp_path / path)) == name
    assert identity.base_model_name(f"{tmp_path / path}/") == name
