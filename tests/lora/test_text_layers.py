"""LoRA files with layers of CLIP: names elsewhere, conversion without loss, info, fuse, refusals. All in numpy."""

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from flux_db.__main__ import main
from flux_db.demo.tiny_model import write_tiny_model
from flux_db.errors import UserError
from flux_db.lora import convert, layer_names, lora_file, merge, trained_file
from flux_db.settings.schema import from_flat_dict
from flux_db.weight_file import to_bytes

WIDTH, RANK = 32, 4
TRANSFORMER = (
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.0.attn.to_k",
    "single_transformer_blocks.1.proj_out",
)
CLIP = tuple(
    f"text_model.encoder.layers.{i}.{layer}"
    for i in (0, 1)
    for layer in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.out_proj",
        "mlp.fc1",
        "mlp.fc2",
    )
)
OUTPUTS_INPUTS = {"mlp.fc1": (4, 1), "mlp.fc2": (1, 4), "proj_out": (1, 5)}


def tensors(alpha=None, parts=(("transformer", TRANSFORMER), ("text_encoder", CLIP)), width=WIDTH):
    rng, found = np.random.default_rng(0), {}
    for prefix, layers in parts:
        for layer in layers:
            ratio = next((value for end, value in OUTPUTS_INPUTS.items() if layer.endswith(end)), (1, 1))
            outputs, inputs = (n * width for n in ratio)
            found[f"{prefix}.{layer}.lora_A.weight"] = rng.standard_normal((RANK, inputs)).astype(np.float32)
            found[f"{prefix}.{layer}.lora_B.weight"] = rng.standard_normal((outputs, RANK)).astype(np.float32)
            if alpha is not None:
                found[f"{prefix}.{layer}.alpha"] = np.array(alpha, np.float32)
    return found


def write(path, values, metadata=None):
    path.write_bytes(to_bytes(values, metadata or {}))
    return path


def converted(source, format_, target):
    return write(target, *convert.convert(lora_file.read(source), format_))


def trained(path):
    """As a run writes it, with diffusers' metadata of both LoRAs."""
    settings = {"pretrained_model_name_or_path": "m", "instance_data_dir": "", "instance_prompt": "x", "rank": RANK}
    config = from_flat_dict({**settings, "train_text_encoder": True, "text_encoder_layers": "all"})
    path.write_bytes(trained_file.lora_file(tensors(), config, trained_file.Facts(steps=1, pictures=1, global_batch=1)))
    return path


def metadata(path):
    with safe_open(path, "numpy") as file:
        return file.metadata()


def test_names_in_the_other_programs():
    name = "text_encoder.text_model.encoder.layers.11.self_attn.out_proj"
    assert layer_names.text_name("lora_te1_text_model_encoder_layers_11_self_attn_out_proj") == ("lora_te1_", name)
    assert layer_names.text_name("lora_te1_text_model_encoder_layers_11_mlp_fc1")[1].endswith("11.mlp.fc1")
    assert layer_names.text_name(f"text_encoders.clip_l.transformer.{name.removeprefix('text_encoder.')}")[1] == name
    assert layer_names.is_text(name) and not layer_names.is_text("transformer_blocks.0.attn.to_q")
    for other in ("lora_te1_text_model_encoder_layers_01_mlp_fc1", "lora_te3_encoder_block_0_layer_0_SelfAttention_q"):
        assert layer_names.text_name(other) is None


@pytest.mark.parametrize("format_", ["kohya", "comfyui"])
@pytest.mark.parametrize("alpha", [None, RANK, 10.0])
@pytest.mark.parametrize("only_text", [False, True])
def test_there_and_back_gives_the_same_bytes(tmp_path, format_, alpha, only_text):
    parts = (("text_encoder", CLIP),) if only_text else (("transformer", TRANSFORMER), ("text_encoder", CLIP))
    source = write(tmp_path / "d", tensors(alpha, parts), {"format": "pt"})
    there = converted(source, format_, tmp_path / "t")
    keys = load_file(there)
    module = "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"
    assert keys[f"{module}.alpha"] == (alpha or RANK)
    for kohya, own in (("down", "A"), ("up", "B")):
        wanted = tensors(alpha, parts)[f"text_encoder.{CLIP[0]}.lora_{own}.weight"]
        assert keys[f"{module}.lora_{kohya}.weight"].tobytes() == wanted.tobytes()
    assert not any(name.startswith("text_encoder") for name in keys)
    assert converted(there, "diffusers", tmp_path / "b").read_bytes() == source.read_bytes()


def test_the_file_of_a_run_there_and_back(tmp_path):
    source = trained(tmp_path / "d")
    settings = json.loads(metadata(source)["lora_adapter_metadata"])
    assert settings["text_encoder.r"] == RANK and settings["text_encoder.target_modules"] == sorted(CLIP)
    assert settings["transformer.target_modules"] == sorted(TRANSFORMER)
    assert metadata(source)["text_encoder_rank"] == str(RANK)
    assert not any(key.endswith(".alpha") for key in load_file(source)), "diffusers rejects alphas beside its metadata"
    for format_ in ("kohya", "comfyui"):
        there = converted(source, format_, tmp_path / format_)
        assert "lora_adapter_metadata" not in metadata(there)
        assert converted(there, "diffusers", tmp_path / f"back {format_}").read_bytes() == source.read_bytes()


def test_a_foreign_kohya_file_there_and_back(tmp_path):
    """A LoRA on the text encoder beside fused layers whose parts share a down matrix, each with its own alpha."""
    rng = np.random.default_rng(1)
    values = {}
    for number, (module, outputs) in enumerate(
        {
            "lora_unet_double_blocks_0_img_attn_qkv": 3,
            "lora_te1_text_model_encoder_layers_1_self_attn_v_proj": 1,
        }.items()
    ):
        values[f"{module}.alpha"] = np.array(2.0 + number, np.float16)
        values[f"{module}.lora_down.weight"] = rng.standard_normal((RANK, WIDTH)).astype(np.float16)
        values[f"{module}.lora_up.weight"] = rng.standard_normal((outputs * WIDTH, RANK)).astype(np.float16)
    source = write(tmp_path / "k", values, {"format": "pt"})
    there = converted(source, "diffusers", tmp_path / "d")
    own = "text_encoder.text_model.encoder.layers.1.self_attn.v_proj"
    assert load_file(there)[f"{own}.alpha"] == 3.0
    assert converted(there, "kohya", tmp_path / "b").read_bytes() == source.read_bytes()
    assert lora_file.read(source).text_layers[own].scale == 3.0 / RANK


def test_settings_that_contradict_the_text_layers_are_reported(tmp_path):
    source = trained(tmp_path / "d")
    about = metadata(source)
    about["lora_adapter_metadata"] = about["lora_adapter_metadata"].replace(
        f'"text_encoder.r": {RANK}', '"text_encoder.r": 8'
    )
    wrong = write(tmp_path / "w", load_file(source), about)
    with pytest.raises(UserError, match=r"text_encoder\.text_model\.\S+ has rank 4, but the settings .* say 8"):
        convert.parts(lora_file.read(wrong))


def test_info_counts_both_parts(tmp_path, capsys):
    assert main(["info", str(trained(tmp_path / "d.safetensors"))]) == 0
    text = capsys.readouterr().out
    assert "3 of FLUX.1's transformer" in text and "12 of CLIP's text model, width 32" in text
    assert "text_encoder.text_model.encoder.layers.*.mlp.fc1" in text


def test_t5_is_left_out_but_clip_is_not(tmp_path, capfd):
    t5 = {f"lora_te3_encoder_block_0.lora_{side}.weight": np.ones((2, 2), np.float32) for side in ("down", "up")}
    file = lora_file.read(write(tmp_path / "x", {**tensors(), **t5}))
    assert set(convert.parts(file)) == {*TRANSFORMER, *(f"text_encoder.{name}" for name in CLIP)}
    assert "1 layers of text encoders are not used" in capfd.readouterr().err


def test_resize_and_merge_loras_keep_both_parts(tmp_path):
    source, output = trained(tmp_path / "d"), tmp_path / "r.safetensors"
    assert main(["merge-loras", f"{source}:0.5", str(source), "--rank", str(2 * RANK), "-o", str(output)]) == 0
    before, after = (lora_file.read(path).layers for path in (source, output))
    assert before.keys() == after.keys() and "text_encoder_rank" not in metadata(output)
    assert all(np.allclose(after[name].delta(), 1.5 * layer.delta(), atol=1e-4) for name, layer in before.items())


def test_fuse_merges_both_parts(tmp_path):
    model = tmp_path / "model"
    write_tiny_model(model, "tiny")
    kohya = converted(trained(tmp_path / "d"), "kohya", tmp_path / "k")
    assert main(["fuse", str(model), str(kohya), "--scale", "0.5", "-o", str(tmp_path / "fused")]) == 0
    for part, layers in (("transformer", TRANSFORMER), ("text_encoder", CLIP)):
        (before,), (after,) = (merge.weight_files(folder, part) for folder in (model, tmp_path / "fused"))
        changed = [name for name in before.entries if before.read(name).tobytes() != after.read(name).tobytes()]
        assert sorted(changed) == sorted(f"{layer}.weight" for layer in layers)
        for layer in layers:
            down, up = (tensors()[f"{part}.{layer}.lora_{side}.weight"] for side in ("A", "B"))
            added = after.read(f"{layer}.weight") - before.read(f"{layer}.weight")
            assert np.allclose(added, 0.5 * up @ down, atol=1e-5)
    wide = write(tmp_path / "wide", tensors(parts=(("text_encoder", CLIP[:1]),), width=768))
    with pytest.raises(UserError, match=r"q_proj is \(32, 32\) in the model and \(768, 768\) in the LoRA"):
        merge.fuse(model, [merge.Weighted(wide)], tmp_path / "no")
