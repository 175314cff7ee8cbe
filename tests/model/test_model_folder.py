"""A model folder is refused before it is loaded, if its files do not give each network exactly the weights it needs."""

import hashlib
import json
import math
import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from program import PYTHON, command, flags, run, trainer
from safetensors.numpy import load_file, save_file
from world import split_weights

from flux_db.check.model import check_model, locate_checked
from flux_db.data import encode, encode_cache
from flux_db.data.dataset import read_dataset
from flux_db.demo.tiny_model import clip_config, t5_config, transformer_config, vae_config
from flux_db.errors import UserError
from flux_db.model import part_weights, parts
from flux_db.model.expected_weights import expected_weights
from flux_db.model.identity import Licence, base_model_name, licence
from flux_db.model.model_folder import NETWORKS, fingerprint

FILES = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
    "text_encoder_2": "model.safetensors",
}
# A tensor of each network: a matrix with a bias is left incomplete without it.
VICTIMS = {
    "transformer": "single_transformer_blocks.0.proj_out.weight",
    "vae": "decoder.up_blocks.2.resnets.0.conv1.weight",
    "text_encoder": "text_model.encoder.layers.1.layer_norm2.weight",
    "text_encoder_2": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
}


@pytest.fixture
def model(world, tmp_path):
    """A copy of the small model, to be damaged."""
    return shutil.copytree(world.model, tmp_path / "model")


@pytest.fixture
def problems(world, model, tmp_path):
    """What is found wrong with the copy, without the words that all problems begin with."""

    def find(**changes):
        settings = {"pretrained_model_name_or_path": str(model), **changes}
        found = check_model(model, world.config(tmp_path / "out", **settings))
        return [problem.removeprefix(f"--pretrained_model_name_or_path {model}: ") for problem in found]

    assert find() == []
    return find


def weights(model: Path, part: str) -> Path:
    return model / part / FILES[part]


def edit(file: Path, change) -> None:
    """Apply a function to the tensors of a weight file."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes), encoding="utf-8")


def remove(name):
    return lambda tensors: tensors.pop(name)


def rename(name):
    return lambda tensors: tensors.update({name.replace("weight", "wait"): tensors.pop(name)})


def reshape(name):
    return lambda tensors: tensors.update({name: tensors[name][..., :-1].copy()})


def requantise(name):
    return lambda tensors: tensors.update({name: tensors[name].astype(np.int8)})


# ---- what a network needs ----


def configs(size: str) -> dict[str, dict]:
    vae, clip, t5 = vae_config(size), clip_config(size, 90), t5_config(size, 80)
    return {
        "vae": vae,
        "text_encoder": clip,
        "text_encoder_2": t5,
        "transformer": transformer_config(size, vae, clip, t5),
    }


# Changes to the small model's settings, each for one part.
VERSIONS = [
    ("transformer", {}),
    ("transformer", {"guidance_embeds": False}),
    ("transformer", {"num_layers": 1, "num_single_layers": 3, "num_attention_heads": 3}),
    ("transformer", {"in_channels": 12, "out_channels": 20, "joint_attention_dim": 40, "pooled_projection_dim": 24}),
    ("transformer", {"patch_size": 2, "attention_head_dim": 32, "axes_dims_rope": [8, 12, 12]}),
    ("text_encoder", {}),
    ("text_encoder", {"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 100, "vocab_size": 70}),
    ("text_encoder", {"max_position_embeddings": 20}),
    ("text_encoder_2", {}),
    ("text_encoder_2", {"feed_forward_proj": "relu", "is_gated_act": False}),
    ("text_encoder_2", {"feed_forward_proj": "relu", "is_gated_act": True}),
    ("text_encoder_2", {"num_layers": 1, "d_model": 40, "num_heads": 2, "d_kv": 12, "d_ff": 90}),
    ("text_encoder_2", {"relative_attention_num_buckets": 16, "vocab_size": 60}),
    ("vae", {}),
    ("vae", {"use_quant_conv": True}),
    ("vae", {"use_post_quant_conv": True, "use_quant_conv": True}),
    ("vae", {"mid_block_add_attention": False}),
    ("vae", {"layers_per_block": 3, "latent_channels": 4, "in_channels": 4, "out_channels": 1}),
    (
        "vae",
        {
            "block_out_channels": [8, 16],
            "down_block_types": ["DownEncoderBlock2D"] * 2,
            "up_block_types": ["UpDecoderBlock2D"] * 2,
        },
    ),
]


def built(part: str, config: dict):
    """mindone's own network of these settings."""
    import mindone.diffusers as diffusers
    import mindone.transformers as transformers
    from transformers import CLIPTextConfig, T5Config

    if part == "text_encoder":
        return transformers.CLIPTextModel(CLIPTextConfig.from_dict(config))
    if part == "text_encoder_2":
        return transformers.T5EncoderModel(T5Config.from_dict(config))
    kind = {"transformer": diffusers.FluxTransformer2DModel, "vae": diffusers.AutoencoderKL}[part]
    return kind.from_config(config)


def parameters(part: str, network) -> dict[str, tuple[int, ...]]:
    """Names as in the files, by mindone's own mapping, and shapes."""
    if part.startswith("text_encoder"):
        from mindone.transformers.modeling_utils import _get_pt2ms_mappings
    else:
        from mindone.diffusers.models.modeling_utils import _get_pt2ms_mappings
    names = {ours: torch for torch, (ours, _) in _get_pt2ms_mappings(network).items()}
    return {names.get(name, name): tuple(parameter.shape) for name, parameter in network.parameters_and_names()}


@pytest.mark.parametrize(
    ("size", "part", "changes"),
    [*(("mid", part, {}) for part in NETWORKS), *(("tiny", part, changes) for part, changes in VERSIONS)],
    ids=str,
)
def test_the_description_is_that_of_mindones_networks(cpu, size, part, changes):
    config = configs(size)[part] | changes
    assert expected_weights(part, config) == parameters(part, built(part, config))


def test_what_is_absent_has_the_default_of_mindones_networks(cpu):
    sizes = {"num_layers", "num_single_layers", "num_hidden_layers", "num_attention_heads", "attention_head_dim"}
    sizes |= {"axes_dims_rope"}
    sizes |= {"block_out_channels", "down_block_types", "up_block_types", "latent_channels", "norm_num_groups"}
    for part, config in configs("tiny").items():
        config = {name: value for name, value in config.items() if name in sizes}
        assert expected_weights(part, config) == parameters(part, built(part, config)), part


def count(shapes: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    return len(shapes), sum(map(math.prod, shapes.values()))


def test_flux_1_has_as_many_parameters_as_is_known():
    """Of the published models: tensors and numbers."""
    dev = {"guidance_embeds": True, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
           "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768,
           "in_channels": 64}  # fmt: skip
    t5 = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24, "vocab_size": 32128,
          "feed_forward_proj": "gated-gelu"}  # fmt: skip
    clip = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "vocab_size": 49408}
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    vae = {**blocks, "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 16,
           "use_quant_conv": False, "use_post_quant_conv": False}  # fmt: skip
    assert count(expected_weights("transformer", dev)) == (1160, 11_901_408_320)
    assert count(expected_weights("transformer", dev | {"guidance_embeds": False})) == (1156, 11_891_178_560)
    assert count(expected_weights("text_encoder_2", t5)) == (219, 4_762_310_656)
    assert count(expected_weights("text_encoder", clip)) == (196, 123_060_480)
    assert count(expected_weights("vae", vae)) == (244, 83_819_683)


# ---- weights that do not fit ----


@pytest.mark.parametrize("part", NETWORKS)
def test_tensors_that_are_missing_renamed_misshapen_or_quantised_are_named(problems, model, part):
    victim, file = VICTIMS[part], weights(model, part)
    whole, name = file.read_bytes(), f"{part}/{FILES[part]}"
    total = len(load_file(file))

    edit(file, remove(victim))
    assert problems() == [
        f"{name} lacks 1 of the {total} tensors that config.json asks for: {victim}; the download may be incomplete"
    ]
    file.write_bytes(whole)
    edit(file, rename(victim))
    lacking, unknown = problems()
    assert f"asks for: {victim};" in lacking
    assert f"does not ask for: {victim.replace('weight', 'wait')};" in unknown
    file.write_bytes(whole)
    edit(file, reshape(victim))
    (problem,) = problems()
    shape = load_file(file)[victim].shape
    wanted = (*shape[:-1], shape[-1] + 1)
    assert f"{victim} ({' x '.join(map(str, shape))}, not {' x '.join(map(str, wanted))})" in problem
    file.write_bytes(whole)
    edit(file, requantise(victim))
    (problem,) = problems()
    if part == "transformer":  # whose matrices may be int8, with their scales
        assert f"asks for: {victim}_scale;" in problem
    else:
        assert f"{victim} (I8); quantised weights cannot be used" in problem


def test_a_column_in_place_of_a_vector_is_another_shape(problems, model):
    """MindSpore would load it without a word."""
    name = "norm_out.linear.bias"
    edit(weights(model, "transformer"), lambda tensors: tensors.update({name: tensors[name][:, None].copy()}))
    (problem,) = problems()
    assert f"{name} (64 x 1, not 64)" in problem


def test_of_many_the_first_few_are_named_and_the_rest_counted(problems, model):
    edit_json(model / "transformer" / "config.json", num_single_layers=2)
    (problem,) = problems()
    assert "lacks 14 of the 80 tensors" in problem and problem.count("single_transformer_blocks.1.") == 3
    assert "and 11 more; the download may be incomplete" in problem


@pytest.mark.parametrize("embeds", [True, False])
def test_guidance_embeds_is_held_against_the_weights(problems, model, embeds):
    if embeds:
        for name in [name for name in load_file(weights(model, "transformer")) if "guidance" in name]:
            edit(weights(model, "transformer"), remove(name))
    else:
        edit_json(model / "transformer" / "config.json", guidance_embeds=False)
    (problem,) = problems()
    assert problem.startswith(f"transformer/config.json says guidance_embeds {str(embeds).lower()}, but the weights ")
    assert "time_text_embed.guidance_embedder.linear_1.weight" in problem and "and 1 more" in problem


@pytest.mark.parametrize("precision", [np.float64, np.float32, np.float16])
def test_weights_of_any_floating_type_are_fine(problems, model, precision):
    edit(weights(model, "vae"), lambda tensors: tensors.update({k: v.astype(precision) for k, v in tensors.items()}))
    assert problems() == []


def test_known_extras_and_t5s_two_names_are_accepted_and_loaded(cpu, problems, model):
    from flux_db.model import loading, runtime

    edit(
        weights(model, "text_encoder"),
        lambda tensors: tensors.update(
            {
                "text_model.embeddings.position_ids": np.arange(77)[None],
                "text_projection.weight": np.zeros((32, 32), np.float32),
            }
        ),
    )
    embedding = load_file(weights(model, "text_encoder_2"))["shared.weight"]
    for both in (True, False):
        edit(
            weights(model, "text_encoder_2"),
            lambda tensors, both=both: tensors.update(
                {"encoder.embed_tokens.weight": tensors["shared.weight"] if both else tensors.pop("shared.weight")}
            ),
        )
        assert problems() == []
        loaded = loading.load_t5(model, runtime.DTYPES["no"])
        np.testing.assert_array_equal(loaded.shared.weight.asnumpy(), embedding)
    loading.load_clip(model, runtime.DTYPES["no"])


@pytest.mark.parametrize("shards", [(), ("1.safetensors", "2.safetensors")], ids=["one file", "shards"])
def test_t5s_two_names_must_hold_one_embedding(problems, model, shards):
    file = weights(model, "text_encoder_2")
    edit(file, lambda tensors: tensors.update({"encoder.embed_tokens.weight": 2 * tensors["shared.weight"]}))
    if shards:
        file = split_weights(file, *shards)
    (problem,) = problems()
    assert problem.startswith(f"text_encoder_2/{file.name} holds encoder.embed_tokens.weight and shared.weight, which")
    assert problem.endswith("with different values; fetch it again")


@pytest.mark.parametrize("part", NETWORKS)
def test_check_refuses_a_model_with_a_weight_missing(world, model, tmp_path, part):
    edit(weights(model, part), remove(VICTIMS[part]))
    settings = world.settings(tmp_path / "out", pretrained_model_name_or_path=str(model))
    done = run(command("check", *flags(settings)))
    assert done.returncode == 2 and VICTIMS[part] in done.stderr and "can start" not in done.stdout
    assert "Traceback" not in done.stderr


def test_the_trainer_and_the_other_commands_refuse_it_too(world, model, tmp_path):
    edit(weights(model, "transformer"), remove(VICTIMS["transformer"]))
    settings = world.settings(tmp_path / "out", pretrained_model_name_or_path=str(model))
    words = ["--model", model, "--prompt", "a dog", "-o", tmp_path / "pictures", "--device", "CPU"]
    lora = tmp_path / "lora.safetensors"
    layer = "transformer.single_transformer_blocks.0.attn.to_q.lora_{}.weight"
    save_file({layer.format(side): np.zeros((32, 32), np.float32) for side in "AB"}, lora)
    for start in (
        trainer(settings),
        command("encode", *flags(settings)),
        command("class-images", *flags(settings)),
        command("generate", *words),
        command("fuse", model, lora, "-o", tmp_path / "fused"),
    ):
        done = run(start)
        assert done.returncode == 2 and VICTIMS["transformer"] in done.stderr, (start, done.stderr)
        assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("out/*")) and not (tmp_path / "fused").exists()


# ---- around the check: what is loaded is asked once more ----


@pytest.mark.parametrize("part", NETWORKS)
@pytest.mark.parametrize("shards", [(), ("1.safetensors", "2.safetensors")], ids=["one file", "shards"])
def test_a_network_is_never_left_with_random_weights(cpu, model, part, shards, monkeypatch):
    from flux_db.model import loading, runtime

    loaders = {"transformer": "transformer", "vae": "vae", "text_encoder": "clip", "text_encoder_2": "t5"}
    load = getattr(loading, f"load_{loaders[part]}")
    file = weights(model, part)
    files = [file]
    if shards:
        split_weights(file, *shards)
        files = [file.with_name(shard) for shard in shards]
    load(model, runtime.DTYPES["no"])
    for file in files:
        if VICTIMS[part] in load_file(file):
            edit(file, remove(VICTIMS[part]))  # the index goes on to list it
    with pytest.raises(UserError, match=VICTIMS[part]):
        load(model, runtime.DTYPES["no"])
    monkeypatch.setattr(parts, "part_problems", lambda *_: [])
    with pytest.raises(UserError, match=f"lacks weights that mindone did not find in it: {VICTIMS[part]}"):
        load(model, runtime.DTYPES["no"])


CHATTER = """
import logging, os, warnings
from flux_db.model.quiet import quiet

print("before")
with quiet():
    print("chatter")
    os.system("echo chatter of a library in C")
    logging.getLogger("mindone.some.model").warning("%d weights were replaced\\nby others", 3)
    logging.getLogger("mindone.some.model").info("chatter")
    warnings.warn("this changes the result")
    warnings.warn("chatter: will be removed in v5", FutureWarning)
print("after")
"""


def test_quiet_does_not_swallow_warnings():
    done = run([PYTHON, "-c", CHATTER])
    assert done.stdout == "before\nafter\n"
    assert done.stderr.splitlines() == [
        "warning: mindone.some.model: 3 weights were replaced by others",
        "warning: UserWarning: this changes the result",
    ]


# ---- files that are no weights, and indexes that are wrong ----


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize("part", ["transformer", "text_encoder_2"])
@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (cut, "is cut off"),
        (lambda data: data[:5], "not a safetensors file"),
        (lambda data: b"<!DOCTYPE html><html>404</html>" * 99, "not a safetensors file"),
        (lambda data: random.Random(0).randbytes(5000), "not a safetensors file"),
        (lambda data: b"", "is empty"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of Git LFS"),
    ],
)
@pytest.mark.parametrize("shards", [(), ("1.safetensors", "2.safetensors")], ids=["one file", "shards"])
def test_what_is_no_weight_file_is_named(problems, model, part, spoil, word, shards):
    file = weights(model, part)
    if shards:
        split_weights(file, *shards)
        file = file.with_name(shards[1])
    file.write_bytes(spoil(file.read_bytes()))
    (problem,) = problems()
    assert problem.startswith(f"{part}/{file.name}") and word in problem


def test_a_pipe_a_folder_and_a_dead_link_are_no_weights(problems, model):
    vae, clip, t5 = (weights(model, part) for part in ("vae", "text_encoder", "text_encoder_2"))
    for file in (vae, clip, t5):
        file.unlink()
    os.mkfifo(vae)
    clip.mkdir()
    t5.symlink_to("../blobs/gone")
    start = time.monotonic()
    assert [problem.split(";")[0] for problem in problems()] == [
        f"vae/{vae.name} cannot be read (is a pipe, not a file)",
        f"text_encoder/{clip.name} cannot be read (is a folder, not a file)",
        f"text_encoder_2/{t5.name} is missing",
    ]
    assert time.monotonic() - start < 5


def test_other_formats_are_not_loaded(problems, model):
    weights(model, "vae").rename(model / "vae" / "diffusion_pytorch_model.bin")
    (problem,) = problems()
    assert problem.startswith("vae has no weights (diffusion_pytorch_model.safetensors or ")
    assert "diffusion_pytorch_model.bin is of another format" in problem


@pytest.mark.parametrize("part", ["transformer", "text_encoder_2"])
def test_an_index_must_agree_with_its_files(problems, model, part):
    file, victim = weights(model, part), VICTIMS[part]
    index = split_weights(file, "1.safetensors", "2.safetensors")
    name, whole = f"{part}/{index.name}", index.read_text()
    assert problems() == []
    weight_map = json.loads(whole)["weight_map"]
    first, second = (index.with_name(f"{n}.safetensors") for n in (1, 2))
    holder, other = (first, second) if weight_map[victim] == first.name else (second, first)

    def with_map(**changes):
        index.write_text(json.dumps({"metadata": {}, "weight_map": {**weight_map, **changes}}))
        return [problem.removeprefix(f"{name} ").split(";")[0] for problem in problems()]

    assert with_map(**{victim: other.name}) == [f"lists tensors in a file that does not hold them: {victim}"]
    assert with_map(ghost=first.name) == ["lists tensors in a file that does not hold them: ghost"]
    for shard in ("/etc/passwd", "../transformer/1.safetensors", "a/1.safetensors", "1.bin", "..", "", ".", 7, None):
        assert with_map(**{victim: shard}) == [f"names {shard!r}, which is no safetensors file in its own folder"]
    assert with_map(**{victim: "3.safetensors"}) == [f"{part}/3.safetensors is missing"]
    index.write_text(json.dumps({"metadata": {}, "weight_map": {k: v for k, v in weight_map.items() if k != victim}}))
    (problem,) = problems()
    assert problem.startswith(f"{name} does not list all tensors of its files: {victim};")
    index.write_text(json.dumps({"metadata": {}, "weight_map": {k: first.name for k in load_file(first)}}))
    (problem,) = problems()  # the second file is not listed at all
    assert problem.startswith(f"{name} lacks {len(load_file(second))} of the ")
    index.write_text(whole.replace(f'"{victim}"', f'"{victim}": "1.safetensors", "{victim}"'))
    (problem,) = problems()
    assert problem.startswith(f"{name} cannot be read (it has ") and "twice" in problem
    index.write_text(whole)
    edit(other, lambda tensors: tensors.update({victim: load_file(holder)[victim]}))
    assert [problem.split(";")[0] for problem in problems()] == [
        f"{name} names several files that hold the same tensors: {victim}"
    ]


def test_a_file_beside_the_index_does_no_harm(problems, model):
    index = split_weights(weights(model, "transformer"), "1.safetensors", "2.safetensors")
    index.with_name("old.safetensors").write_bytes(b"something else")
    assert problems() == []


# ---- settings ----


HOSTILE = [
    ("transformer", {"num_layers": 10**9}, "num_layers 1000000000: must be a whole number from 1 to 1000"),
    ("transformer", {"num_single_layers": -1}, "num_single_layers -1: must be"),
    ("transformer", {"num_attention_heads": "two"}, "num_attention_heads 'two': must be"),
    ("transformer", {"num_attention_heads": 2.0}, "num_attention_heads 2.0: must be"),
    ("transformer", {"attention_head_dim": 10**300}, "must be a whole number from 1 to"),
    ("transformer", {"in_channels": True}, "in_channels True: must be"),
    ("transformer", {"guidance_embeds": "false"}, "guidance_embeds 'false': must be true or false"),
    ("transformer", {"out_channels": [[[[]]]]}, "out_channels [[[[]]]]: must be"),
    ("transformer", {"axes_dims_rope": [4, 6, 8]}, "axes_dims_rope [4, 6, 8]: must be even numbers that add up to"),
    ("transformer", {"axes_dims_rope": "axes"}, "axes_dims_rope 'axes': must be"),
    ("text_encoder", {"num_hidden_layers": 10**7}, "num_hidden_layers 10000000: must be"),
    ("text_encoder", {"model_type": "clip"}, "text_config must be an object"),
    ("text_encoder_2", {"num_layers": None}, "num_layers None: must be"),
    ("text_encoder_2", {"feed_forward_proj": 3}, "feed_forward_proj 3: must be a text"),
    ("vae", {"block_out_channels": [8] * 10**6}, "block_out_channels [8, 8, 8, 8, 8, 8, ...]: must be a list of 1 to"),
    ("vae", {"block_out_channels": [8, 0, 8, 8]}, "block_out_channels 0: must be"),
    ("vae", {"down_block_types": ["AttnDownEncoderBlock2D"] * 4}, "must be DownEncoderBlock2D for each of the 4"),
    ("vae", {"layers_per_block": 10**9}, "layers_per_block 1000000000: must be"),
    ("vae", {"scaling_factor": "0.3611"}, "scaling_factor '0.3611': must be a number from 0.0001 to 10000"),
    ("vae", {"scaling_factor": None}, "scaling_factor None: must be a number"),
    ("vae", {"shift_factor": True}, "shift_factor True: must be a number"),
    ("vae", {"shift_factor": math.nan}, "cannot be read (NaN is no number)"),
    ("scheduler", {"num_train_timesteps": 10**12}, "num_train_timesteps 1000000000000: must be a whole number from 1"),
    ("scheduler", {"num_train_timesteps": 1000.0}, "num_train_timesteps 1000.0: must be a whole number"),
    ("text_encoder", {"transformers_weights": "../../x.safetensors"}, "so that other weights would be loaded"),
]


@pytest.mark.parametrize(("part", "changes", "text"), HOSTILE, ids=lambda value: str(value)[:40])
def test_a_hostile_config_is_one_line(problems, model, part, changes, text):
    name = "scheduler_config.json" if part == "scheduler" else "config.json"
    edit_json(model / part / name, **changes)
    start = time.monotonic()
    (problem,) = problems()
    assert problem.startswith(part) and text in problem and len(problem) < 300
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[" * 10**5, "nested too deeply"),
        ('{"a":' * 10**5, "nested too deeply"),
        ('{"scaling_factor": 1e999}', "1e999 is no number"),
        ('{"a": 1, "a": 2}', "it has 'a' twice"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read"),
        ("\x00\x01", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (" " * (17 * 2**20), "has more than 16 MiB"),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("file", ["vae/config.json", "tokenizer/vocab.json", "tokenizer_2/tokenizer_config.json"])
def test_a_hostile_json_file_is_one_line(problems, model, file, content, text):
    (model / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    (problem,) = problems()
    assert problem.startswith(f"{file} cannot be read (") and text in problem and len(problem) < 300


@pytest.mark.parametrize(
    "file",
    ["model_index.json", "scheduler/scheduler_config.json", "tokenizer/merges.txt", "tokenizer_2/tokenizer.json"],
)
def test_pipes_and_devices_are_not_read(problems, model, file):
    (model / file).unlink()
    os.mkfifo(model / file)
    assert f"{file} cannot be read (is a pipe, not a file)" in problems()[0]
    (model / file).unlink()
    (model / file).symlink_to("/dev/zero")
    assert f"{file} cannot be read (is a device, not a file)" in problems()[0]


def test_settings_that_make_no_network_are_one_line(cpu, model):
    """What only mindone itself finds out."""
    from flux_db.model import loading, runtime

    edit_json(model / "vae" / "config.json", norm_num_groups=7)
    with pytest.raises(UserError) as caught:
        loading.load_vae(model, runtime.DTYPES["no"])
    assert str(caught.value).startswith(f"{model / 'vae'}: cannot be loaded (") and len(str(caught.value)) < 600


def test_an_adapter_in_a_text_encoder_is_refused(problems, model):
    """transformers would load the model that the adapter names, from the hub if need be."""
    (model / "text_encoder" / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')
    (problem,) = problems()
    assert "there is an adapter_config.json, so that other weights would be loaded" in problem


def bomb(*, merge: bool) -> str:
    """Ten levels of ten aliases each: ten thousand million values."""
    item = "<<: [{}]" if merge else "[{}]"
    lines = ["a0: &a0 {k: v}" if merge else "a0: &a0 [lol, lol]"]
    for level in range(1, 11):
        content = item.format(", ".join([f"*a{level - 1}"] * 10))
        lines.append(f"a{level}: &a{level} {{{content}}}" if merge else f"a{level}: &a{level} {content}")
    return "\n".join([*lines, "license: *a10"])


@pytest.mark.parametrize(
    "card",
    [
        f"---\n{bomb(merge=False)}\n---\n",
        f"---\n{bomb(merge=True)}\n---\n",
        f"---\nlicense: {'[' * 30_000}\n---\n",
        f"---\nlicense: {'x' * 1000}\n---\n",
        "---\nlicense: [mit]\n---\n",
        "---\n- license\n---\n",
        "---\n" + "a: b\n" * 300_000 + "license: mit\n---\n",
    ],
    ids=lambda device: device[:30],
)
def test_a_hostile_card_of_the_base_model_is_ignored(tmp_path, card):
    (tmp_path / "README.md").write_text(card)
    start = time.monotonic()
    assert licence(str(tmp_path)) == Licence("other")
    assert time.monotonic() - start < 5


def test_pipes_and_deep_json_do_not_stop_the_search_for_the_base_models_name(tmp_path):
    os.mkfifo(tmp_path / "README.md")
    (tmp_path / "model_index.json").write_text('{"_name_or_path":' * 10**5)
    assert licence(str(tmp_path)) == Licence("other") and base_model_name(str(tmp_path)) == tmp_path.name
    (tmp_path / "model_index.json").unlink()
    (tmp_path / "model_index.json").symlink_to("/dev/zero")
    assert base_model_name(str(tmp_path)) == tmp_path.name


# ---- variants ----


@pytest.fixture
def variants(model):
    """Every network has plain weights and, twice as large, those of a variant."""
    for part, name in FILES.items():
        tensors = {tensor: 2 * array for tensor, array in load_file(model / part / name).items()}
        save_file(tensors, model / part / name.replace(".safetensors", ".fp16.safetensors"), metadata={"format": "pt"})
    return model


def first_weight(network) -> np.ndarray:
    return next(iter(network.get_parameters())).asnumpy()


def test_a_variant_is_loaded_where_there_is_one_and_the_plain_weights_elsewhere(cpu, problems, variants):
    from flux_db.model import loading, runtime

    precision = runtime.DTYPES["no"]
    (variants / "vae" / "diffusion_pytorch_model.fp16.safetensors").unlink()
    assert problems(variant="fp16") == []
    for load, factor in ((loading.load_vae, 1), (loading.load_t5, 2), (loading.load_transformer, 2)):
        plain = first_weight(load(variants, precision))
        np.testing.assert_array_equal(first_weight(load(variants, precision, "fp16")), factor * plain)
    assert problems(variant="fp61") == [
        f"--variant fp61: no weight file in {variants} is of this variant; give another one or leave it out"
    ]
    assert "--variant ../x: no weight file can have this in its name; give one such as fp16" in problems(variant="../x")


def test_the_variant_is_checked_and_not_the_plain_weights(problems, variants):
    victim = VICTIMS["transformer"]
    edit(variants / "transformer" / "diffusion_pytorch_model.fp16.safetensors", remove(victim))
    assert problems() == []
    (problem,) = problems(variant="fp16")
    assert problem.startswith("transformer/diffusion_pytorch_model.fp16.safetensors lacks 1 of") and victim in problem


def test_a_variant_that_is_needed_is_named_and_an_index_of_old_form_is_refused(problems, model):
    vae = weights(model, "vae")
    vae.rename(vae.with_name("diffusion_pytorch_model.fp16.safetensors"))
    (problem,) = problems()
    assert problem.startswith("vae has no weights (") and problem.endswith("those of a variant: add --variant fp16")
    assert problems(variant="fp16") == []
    vae.with_name("diffusion_pytorch_model.safetensors.fp16.index.json").write_text("{}")  # mindone would prefer it
    (problem,) = problems(variant="fp16")
    assert problem.endswith("rename it to diffusion_pytorch_model.safetensors.index.fp16.json")


def test_a_model_from_the_hub_is_checked_once_it_is_there(world, model, tmp_path, monkeypatch):
    edit(weights(model, "vae"), remove(VICTIMS["vae"]))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: model)
    config = world.config(tmp_path, pretrained_model_name_or_path="somebody/flux")
    with pytest.raises(UserError, match=VICTIMS["vae"]):
        locate_checked(config)


def test_the_checked_files_are_those_that_mindone_loads(cpu, model):
    """With an index and a single file side by side, its diffusers and transformers classes differ."""
    from flux_db.model import loading, runtime

    precision = runtime.DTYPES["no"]
    for part, load, single in (("vae", loading.load_vae, False), ("text_encoder_2", loading.load_t5, True)):
        file = weights(model, part)
        plain, tensors = first_weight(load(model, precision)), load_file(file)
        split_weights(file, "1.safetensors", "2.safetensors")
        save_file({name: 2 * array for name, array in tensors.items()}, file, metadata={"format": "pt"})
        np.testing.assert_array_equal(first_weight(load(model, precision)), (2 if single else 1) * plain)
        assert part_weights.choose(model / part, None).is_index != single


def test_weights_in_the_folder_of_the_model_itself_are_not_loaded(cpu, model):
    """mindone would prefer them to those of the part."""
    from flux_db.model import loading, runtime

    tensors = load_file(weights(model, "vae"))
    save_file({name: 2 * array for name, array in tensors.items()}, model / FILES["vae"], metadata={"format": "pt"})
    loaded = loading.load_vae(model, runtime.DTYPES["no"])
    np.testing.assert_array_equal(first_weight(loaded), tensors["encoder.conv_in.weight"])


def old_fingerprint(folder: Path, parts) -> str:
    """As it has always been for files below 64 MiB."""
    digest = hashlib.sha256()
    for path in sorted(p for part in parts for p in (folder / part).rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def test_cache_and_fingerprints_know_the_variant(world, variants, tmp_path):
    plain, fp16, other = (
        encode_cache.open_cache(
            world.config(tmp_path, pretrained_model_name_or_path=str(variants), variant=variant), variants
        )
        for variant in (None, "fp16", "bf16")
    )
    sample = read_dataset(world.config(tmp_path))[0].examples[0]
    assert plain.prompt_file("a dog") != fp16.prompt_file("a dog")
    assert plain.picture_file(sample, False) != fp16.picture_file(sample, False)
    assert other == plain  # there is no such variant: the same files are loaded
    parts = ("transformer", "vae", "scheduler")
    assert fingerprint(variants, parts, "fp16") != fingerprint(variants, parts) == old_fingerprint(variants, parts)
    assert plain.vae == old_fingerprint(variants, ("vae",))
    text_parts = ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2")
    assert plain.text_model == old_fingerprint(variants, text_parts)


# ---- pictures that change while they are encoded ----


@pytest.mark.parametrize("replaced", ["picture", "mask"])
def test_a_picture_replaced_while_encoding_is_not_stored(cpu, world, tmp_path, replaced):
    folder = shutil.copytree(world.pictures, tmp_path / "pictures")
    from PIL import Image

    for path in folder.glob("*.png"):
        Image.new("L", (64, 64), 255).save(path.with_suffix(".mask.png"))
    config = world.config(
        tmp_path / "out", instance_data_dir=str(folder), encode_cache_dir=str(tmp_path / "cache"), unmasked_weight=0.5
    )
    dataset, _ = read_dataset(config)
    cache = encode_cache.open_cache(config, world.model)
    work = encode.Work((), encode.missing(config, cache, dataset).pictures)
    assert len(work.pictures) == 3
    victim = min(work.pictures, key=lambda item: item[0].size)[0]
    path = victim.picture.path if replaced == "picture" else victim.mask.path
    Image.open(path).point(lambda value: 255 - value).save(path)
    with pytest.raises(UserError, match=f"{path}: has changed since the run looked at it"):
        encode.encode(config, world.model, cache, work)
    assert not cache.picture_file(victim, False).exists()
