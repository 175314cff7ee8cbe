"""After training: the uploaded run, the merged model, and pictures drawn with the LoRA. One small run serves all."""

import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import program
import pytest
from fake_hub import FakeHub
from huggingface_hub import ModelCard
from mindspore import nn
from PIL import Image
from safetensors.numpy import load_file, save_file

from flux_db.__main__ import main
from flux_db.errors import UserError
from flux_db.lora import convert, generate, generate_flags, lora_file, merge
from flux_db.model import loading, runtime
from flux_db.output_folder import LORA_FILE
from flux_db.weight_file import open_weights, to_bytes

TOKEN = "hf_abcdefghijklmnop"
PROMPT = "a photo of sks dog"


@pytest.fixture(scope="module")
def run(cpu, world, tmp_path_factory):
    """A LoRA whose alpha is not its rank, strong enough to be seen; trained, sampled and uploaded."""
    from world import train

    output = tmp_path_factory.mktemp("run") / "dog"
    config = world.config(
        output, max_train_steps=3, learning_rate=0.05, lora_alpha=6.0, validation_prompt=[PROMPT],
        lora_layers="single_transformer_blocks.0.attn.to_q,single_transformer_blocks.0.proj_out", validation_steps=3,
        num_validation_images=2, validation_inference_steps=2, push_to_hub=True, hub_model_id="me/dog",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, FakeHub(token=TOKEN) as server:
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        assert train(config) == 0
    return config, output, server


def test_a_run_is_carded_and_uploaded_and_the_token_is_nowhere(run, world):
    _, output, server = run
    uploaded = {
        LORA_FILE,
        "README.md",
        "samples/grid.png",
        *(f"samples/step-00003/0{n}.png" for n in (0, 1)),
    }
    assert set(server.repos["me/dog"]["files"]) == uploaded
    text = (output / "README.md").read_text()
    assert ModelCard(text).data.to_dict()["widget"][1]["output"]["url"] == "samples/step-00003/01.png"
    assert 'pipe.load_lora_weights("me/dog"' in text and str(world.folder) not in text
    files = [path for path in output.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    metadata = open_weights(output / LORA_FILE).metadata
    assert (metadata["pictures"], metadata["steps"], metadata["base_model"]) == ("3", "3", "model")
    assert str(world.folder) not in json.dumps(metadata)


@pytest.fixture(scope="module")
def kohya(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("kohya") / "dog.safetensors"
    path.write_bytes(to_bytes(*convert.convert(lora_file.read(run[1]), "kohya")))
    return path


def test_generate_draws_the_samples_of_training(run, kohya, cpu, world, tmp_path, monkeypatch, capfd):
    """From the LoRA in kohya's format, in two halves; the weights are merged, so up to one grey level."""
    config, output, _ = run
    monkeypatch.setattr(runtime, "start", lambda _: cpu)
    (tmp_path / "prompts.txt").write_text(f"\n{PROMPT}\n\n")
    words = [
        "generate", "--model", str(world.model), "--lora", f"{kohya}:0.25", "--lora", f"{output}:0.75",
        "--size", "32x32", "--prompts_file", str(tmp_path / "prompts.txt"), "--num", "2", "--steps", "2",
        "--max_sequence_length", "16", "--device", "CPU", "--encode_cache_dir", config.data.encode_cache_dir,
        "-o", str(tmp_path / "out"),
    ]  # fmt: skip
    assert main(words) == 0
    assert str(tmp_path / "out" / "grid.png") in capfd.readouterr().out
    for number in range(2):
        drawn = read_picture(tmp_path / "out" / f"000-0{number}.png")
        sample = read_picture(output / f"samples/step-00003/0{number}.png")
        assert np.abs(drawn - sample).max() <= 1
        assert np.abs(sample - read_picture(output / f"samples/step-00000/0{number}.png")).max() > 5, "the LoRA shows"
    assert read_picture(tmp_path / "out" / "grid.png").shape == (32, 68, 3)
    assert main(words) == 2
    assert "000-00.png already" in capfd.readouterr().err


def test_generate_draws_as_the_run_did_without_being_told_how(run, world, tmp_path):
    """Model, size, tokens and steps are the run's: the first sample, and one line that says what was taken."""
    _, output, _ = run
    words = ["--lora", output, "--prompt", PROMPT, "--device", "CPU", "-o", tmp_path / "out"]
    done = program.run(program.command("generate", *words))
    assert done.returncode == 0, done.stderr
    drawn, sample = (read_picture(p) for p in (tmp_path / "out/000-00.png", output / "samples/step-00003/00.png"))
    assert drawn.shape == sample.shape and np.abs(drawn - sample).max() <= 1
    taken = f"Taken from {output}: --model {world.model} --base_precision full --mixed_precision no --size 32x32"
    taken += " --max_sequence_length 16 --steps 2 --guidance 3.5 --seed 42"
    assert [line for line in done.stderr.splitlines() if "Taken" in line] == [taken]


def test_flags_override_the_run_and_a_lone_file_knows_all_but_the_model(run, world, tmp_path):
    _, output, _ = run
    shutil.copy(output / LORA_FILE, tmp_path / "dog.safetensors")
    words = ["--prompt", "a", "-o", str(tmp_path / "out"), "--lora"]
    with pytest.raises(UserError, match="give a --model: the LoRA does not say where the model is"):
        generate_flags.read([*words, str(tmp_path / "dog.safetensors")])
    words = ["--model", str(world.model), "--steps", "9", *words]
    checkpoint = next(output.glob("checkpoint-*"), output)
    for lora in (tmp_path / "dog.safetensors", output / LORA_FILE, checkpoint):
        request = generate_flags.read([*words, str(lora)])
        assert (request.size, request.steps, request.config.data.max_sequence_length) == ((32, 32), 9, 16)
        assert "steps" not in {one.flag for one in request.taken}
    # the first LoRA that knows a value counts, and one that knows nothing changes nothing
    plain, _ = lora_for(tmp_path / "plain.safetensors", {"single_transformer_blocks.0.attn.to_q": (32, 32)})
    assert generate_flags.read([*words, str(plain)]).size == (1024, 1024)
    assert generate_flags.read([*words, str(plain), "--lora", str(output)]).size == (32, 32)


def test_values_of_a_strangers_file_are_taken_only_if_they_can_be(world, tmp_path):
    metadata = {
        "validation_size": "9999999x16", "max_sequence_length": "1000000", "validation_inference_steps": "-3",
        "validation_guidance": "nan", "mixed_precision": "bf16", "base_model": "../../etc",
        "pretrained_model_name_or_path": "/etc", "cache_dir": "/etc", "variant": "fp16",
    }  # fmt: skip
    path, tensors = lora_for(tmp_path / "lora.safetensors", {"single_transformer_blocks.0.attn.to_q": (32, 32)})
    path.write_bytes(to_bytes(tensors, metadata))
    words = ["--prompt", "a", "-o", str(tmp_path / "out"), "--device", "CPU", "--lora", str(path)]
    with pytest.raises(UserError, match="give a --model: the LoRA does not say where the model is"):
        generate_flags.read(words)
    request = generate_flags.read([*words, "--model", str(world.model)])
    assert (request.size, request.steps, request.guidance) == ((1024, 1024), 28, 3.5)
    assert {one.flag for one in request.taken} == {"mixed_precision"}
    assert generate._settings(request).runtime.mixed_precision == "no", "the CPU has no bf16"


def read_picture(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def test_the_fused_model_is_the_model_with_its_lora(run, kohya, cpu, world, tmp_path):
    _, output, _ = run
    assert main(["fuse", str(world.model), str(kohya), "-o", str(tmp_path / "fused")]) == 0
    assert {p.relative_to(tmp_path / "fused") for p in (tmp_path / "fused").rglob("*")} == {
        p.relative_to(world.model) for p in world.model.rglob("*") if p.name != "tiny_model.json"
    }
    fused = loading.load_transformer(tmp_path / "fused", cpu.dtype)
    plain = loading.load_transformer(world.model, cpu.dtype)
    generate.add_loras(plain, merge.read_all([merge.Weighted(output)]), cpu.dtype)
    changed = plain.parameters_dict()
    for name, parameter in fused.parameters_dict().items():
        assert np.array_equal(parameter.asnumpy(), changed[name].asnumpy()), name
    assert main(["fuse", str(world.model), str(kohya), "-o", str(tmp_path / "fused")]) == 2


# ---- Without MindSpore ----


@pytest.fixture
def sharded(world, tmp_path):
    """The model in bf16 and in two files, as FLUX.1-dev comes in three."""
    model = tmp_path / "model"
    shutil.copytree(world.model, model)
    part = model / "transformer"
    tensors = load_file(part / "diffusion_pytorch_model.safetensors")
    (part / "diffusion_pytorch_model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"diffusion_pytorch_model-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
    for file, members in shards.items():
        save_file({name: tensors[name].astype(ml_dtypes.bfloat16) for name in members}, part / file)
    index = {"metadata": {}, "weight_map": {name: file for file, members in shards.items() for name in members}}
    (part / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    return model


def lora_for(path, shapes, rank=2, alpha=3.0):
    rng = np.random.default_rng(0)
    tensors = {}
    for module, (outputs, inputs) in shapes.items():
        tensors[f"transformer.{module}.lora_A.weight"] = rng.standard_normal((rank, inputs)).astype(np.float32)
        tensors[f"transformer.{module}.lora_B.weight"] = rng.standard_normal((outputs, rank)).astype(np.float32)
        tensors[f"transformer.{module}.alpha"] = np.array(alpha, np.float32)
    path.write_bytes(to_bytes(tensors, {}))
    return path, tensors


def test_fuse_goes_file_by_file_and_leaves_the_rest_byte_for_byte(sharded, tmp_path):
    shapes = {"transformer_blocks.0.attn.to_q": (32, 32), "single_transformer_blocks.0.proj_mlp": (128, 32)}
    path, tensors = lora_for(tmp_path / "lora.safetensors", shapes)
    assert main(["fuse", str(sharded), str(path), "-o", str(tmp_path / "fused"), "--scale", "0.5"]) == 0
    before, after = (
        {
            name: (file.path.name, file.read(name))
            for file in merge.weight_files(model, "transformer")
            for name in file.entries
        }
        for model in (sharded, tmp_path / "fused")
    )
    assert before.keys() == after.keys()
    for name, (file, value) in before.items():
        assert after[name][0] == file and after[name][1].dtype == ml_dtypes.bfloat16
        module = name.removesuffix(".weight")
        if module not in shapes:
            assert after[name][1].tobytes() == value.tobytes(), name
            continue
        a, b = (tensors[f"transformer.{module}.lora_{side}.weight"].astype(np.float64) for side in "AB")
        wanted = value.astype(np.float64) + 0.5 * 1.5 * b @ a
        got = after[name][1].astype(np.float64)
        assert np.abs(got - wanted).max() <= np.abs(wanted).max() * 2**-8, "rounded once, to bf16"
        assert np.abs(got - value.astype(np.float64)).max() > 0.1
    same = [
        os.path.samefile(sharded / name, tmp_path / "fused" / name) for name in ("vae/config.json", "model_index.json")
    ]
    assert all(same), "what does not change takes no space"


def test_values_beyond_the_precision_of_the_device_are_refused(cpu, tmp_path):
    """In fp16 they would be infinite, and the picture black."""
    path, _ = lora_for(tmp_path / "lora.safetensors", {"x_embedder": (32, 64)})
    network = nn.Dense(64, 32, has_bias=False)
    network.weight.name = "x_embedder.weight"
    half = runtime.DTYPES["fp16"]
    generate.add_loras(network, merge.read_all([merge.Weighted(path)]), half)
    with pytest.raises(UserError, match=r"x_embedder: with the LoRA its weights are not finite numbers of type F16"):
        generate.add_loras(network, merge.read_all([merge.Weighted(path, 1e5)]), half)


def test_several_loras_add_up(tmp_path):
    path, tensors = lora_for(tmp_path / "lora.safetensors", {"x_embedder": (32, 64)})
    loras = [merge.Weighted(path, 0.5), merge.Weighted(path, -2.0)]
    (layers,) = merge.read_all(loras).values()
    a, b = (tensors[f"transformer.x_embedder.lora_{side}.weight"] for side in "AB")
    assert merge.merged(np.ones((32, 64), np.float32), layers) == pytest.approx(1 - 1.5 * 1.5 * (b @ a), abs=1e-5)


def test_a_lora_that_does_not_fit_is_told_and_nothing_is_left(world, tmp_path, capfd):
    path, _ = lora_for(
        tmp_path / "lora", {"transformer_blocks.0.attn.to_q": (8, 8), "transformer_blocks.9.ff.net.2": (2, 2)}
    )
    assert main(["fuse", str(world.model), str(path), "-o", str(tmp_path / "fused")]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"error: {path}: does not fit {world.model}: ") and "model that it was trained on" in error
    assert "to_q is (32, 32) in the model and (8, 8) in the LoRA" in error
    assert "the model has no layer transformer_blocks.9.ff.net.2" in error
    words = ["--model", str(world.model), "--lora", str(path), "--prompt", "a", "-o", str(tmp_path / "drawn")]
    assert main(["generate", *words, "--device", "CPU", "--encode_cache_dir", str(tmp_path / "cache")]) == 2
    assert "the model has no layer transformer_blocks.9.ff.net.2" in capfd.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["lora"]


def test_all_problems_of_generate_at_once(world, tmp_path):
    words = [
        "--model",
        str(tmp_path / "none"),
        "--lora",
        "nothing:0.5",
        "--lora",
        "x:y",
        "--seed",
        "-1",
        "-o",
        str(tmp_path),
    ]
    with pytest.raises(UserError) as caught:
        generate_flags.read(words)
    text = str(caught.value)
    for part in ("give a --prompt", "--lora nothing: no such file", "y is not a weight", "--seed -1", "--model"):
        assert part in text, text


def test_a_lora_is_named_with_or_without_its_weight(world, tmp_path):
    odd = tmp_path / "name:2"
    odd.mkdir()
    words = ["--model", str(world.model), "--prompt", "a", "-o", str(tmp_path / "out")]
    request = generate_flags.read([*words, "--lora", str(tmp_path), "--lora", f"{tmp_path}:-0.5", "--lora", str(odd)])
    assert request.loras == (
        merge.Weighted(tmp_path, 1.0),
        merge.Weighted(tmp_path, -0.5),
        merge.Weighted(Path(odd), 1.0),
    )
