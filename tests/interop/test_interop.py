"""LoRA files and training, live, both ways: MindSpore here, diffusers on torch in the second environment."""

import json
from pathlib import Path

import mindspore as ms
import numpy as np
import program
import pytest
from mindspore import Tensor
from torch_link import ask_torch, draw_here, run_torch
from world import PROMPT, metrics, train

from flux_db.data import batches, encode_cache
from flux_db.lora import convert, lora_file
from flux_db.model import adapter, flow, loading
from flux_db.model.sampler import Request
from flux_db.parity import golden
from flux_db.settings.schema import LoraConfig, to_flat_dict
from flux_db.stream import BatchLayout, Purpose, generator
from flux_db.training import build
from flux_db.training.prepare import prepare
from flux_db.weight_file import to_bytes

STEPS = 20
RUNS = {
    "alpha is the rank": {"rank": 4},
    "alpha is not the rank, custom layers": {
        "rank": 4,
        "lora_alpha": 10.0,
        "lora_layers": "attn.add_q_proj,attn.to_out.0,ff_context.net.0.proj,proj_mlp",
        "weighting_scheme": "sigma_sqrt",
        "train_batch_size": 2,
    },
}


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS.keys())
def run(request, cpu, world, tmp_path_factory):
    """A LoRA trained here, as the script trains it."""
    config = world.config(
        tmp_path_factory.mktemp("run"), max_train_steps=STEPS, learning_rate=1e-2, guidance_scale=3.5, **request.param
    )
    assert train(config) == 0
    return config


def test_training_follows_the_same_loss(run, cpu, world, tmp_path):
    model, cache, dataset, _ = prepare(run, cpu)
    source = batches.BatchSource(
        config=run,
        dataset=dataset,
        cache=cache,
        layout=BatchLayout(batch=run.optim.train_batch_size),
        latent_shape=build.latent_shape(run, model),
        learning_rates=np.full(STEPS, run.optim.learning_rate, np.float32),
        sigmas=np.linspace(1.0, 0.001, 1000),
    )
    names = {"pooled_prompt_embeds": "pooled"}
    arrays = {
        f"{number}/{names.get(name, name)}": value
        for number in range(STEPS)
        for name, value in source[number]._asdict().items()
        if value is not None
    }
    start = loading.load_transformer(model, ms.float32)
    adapter.inject(start, run.lora, run.output.seed)
    arrays |= {f"start/transformer.{name}.weight": p.asnumpy() for name, p in adapter.parameters(start).items()}
    wanted, _ = ask_torch(
        "train",
        model,
        tmp_path,
        arrays,
        steps=STEPS,
        rank=run.lora.rank,
        alpha=run.lora.alpha,
        layers=run.lora.layers,
        optimizer=to_flat_dict(run),
        loss={"scheme": run.loss.weighting_scheme, "guidance_scale": run.loss.guidance_scale},
    )
    rows = metrics(Path(run.output.output_dir))
    loss, norm = (np.array([row[name] for row in rows]) for name in ("loss", "grad_norm"))
    errors = np.abs(loss / wanted["loss"] - 1), np.abs(norm / wanted["norm"] - 1)
    print(f"loss {errors[0].max():.1e}, norm {errors[1].max():.1e}, relative, of {STEPS} steps")
    assert len(loss) == STEPS and errors[0].max() <= 1e-5
    assert np.ptp(loss) > 1e-3


def picture_request(world, config, model):
    cache = encode_cache.open_cache(config, model)
    prompt = cache.read(cache.prompt_file(PROMPT))
    return Request(**prompt, seed=5, number=0)


def read_lora(path):
    """Settings and weights of a LoRA file with one rank and one alpha for all its layers."""
    layers = lora_file.read(path).layers
    ((rank, alpha),) = {(layer.rank, layer.alpha) for layer in layers.values()}
    config = LoraConfig(rank=rank, lora_alpha=alpha, lora_layers=",".join(sorted(layers)))
    return config, convert.name_tensors(layers, "diffusers")


def test_a_lora_trained_here_draws_the_same_picture_there(run, world, tmp_path):
    file = Path(run.output.output_dir, "pytorch_lora_weights.safetensors")
    request = picture_request(world, run, world.model)
    arrays = {
        "prompt_embeds": request.prompt_embeds,
        "pooled_prompt_embeds": request.pooled_prompt_embeds,
        "noise": generator(request.seed, request.number, Purpose.SAMPLE).standard_normal((16, 8, 8), np.float32),
    }
    there, facts = ask_torch("draw", world.model, tmp_path, arrays, lora=str(file))
    assert facts["remarks"] == []
    config, tensors = read_lora(file)
    weights = {name: value for name, value in tensors.items() if not name.endswith(".alpha")}
    loaded = {name.removeprefix("loaded/"): v for name, v in there.items() if name.startswith("loaded/")}
    assert loaded.keys() == weights.keys(), "no key missing, none unexpected"
    assert all(np.array_equal(loaded[name], weights[name]) for name in weights)

    assert (config.rank, config.alpha) == (run.lora.rank, run.lora.alpha)
    transformer = loading.load_transformer(world.model, ms.float32)
    bare = draw_here(world.model, transformer, request)
    adapter.inject(transformer, config, seed=0)
    adapter.load_state_dict(transformer, tensors)
    with_lora = draw_here(world.model, transformer, request)
    errors = np.abs(bare - there["bare"]).max(), np.abs(with_lora - there["with_lora"]).max()
    effect = np.abs(with_lora - bare).max()
    print(f"picture {errors[0]:.1e}, with LoRA {errors[1]:.1e}; effect of the LoRA {effect:.1e}")
    assert effect > 1e-2
    assert max(errors) <= 2e-4


@pytest.mark.parametrize(
    ("alpha", "layers"), [(4, ["to_q", "to_k"]), (10, ["attn.add_v_proj", "ff.net.2", "proj_out"])]
)
def test_a_lora_made_there_answers_the_same_here(cpu, world, tmp_path, alpha, layers):
    folder = tmp_path / "lora"
    there, _ = ask_torch("make_lora", world.model, tmp_path, save_to=str(folder), rank=4, alpha=alpha, layers=layers)
    config, tensors = read_lora(folder)
    assert (config.rank, config.alpha) == (4, alpha)
    transformer = loading.load_transformer(world.model, ms.float32)
    adapter.inject(transformer, config, seed=0)
    adapter.load_state_dict(transformer, tensors)
    settings = build.step_settings(
        world.config(tmp_path, guidance_scale=golden.GUIDANCE), cpu, world.model, prior=False
    )
    here = answer(transformer, settings)
    error = np.abs(here - there["answer"]).max()
    print(f"transformer with LoRA {error:.1e}")
    assert error <= 5e-4
    adapter.remove(transformer)
    assert np.abs(answer(transformer, settings) - here).max() > 0.05


def answer(transformer, settings):
    batch = {name: Tensor(value) for name, value in golden.batch(0).items()}
    index = golden.batch(0)["index"]
    x_0 = flow.latents_from_moments(batch["pictures"], batch["eps"], settings.vae_shift, settings.vae_scale)
    x_t = flow.add_noise(x_0, batch["noise"], Tensor(settings.sigmas[index]))
    return transformer(
        hidden_states=flow.pack(x_t),
        timestep=Tensor(settings.timesteps[index]),
        guidance=Tensor(np.full(len(index), golden.GUIDANCE, np.float32)),
        pooled_projections=batch["pooled"],
        encoder_hidden_states=batch["prompt_embeds"],
        txt_ids=Tensor(np.zeros((golden.TOKENS, 3), np.float32)),
        img_ids=Tensor(flow.image_position_ids(golden.SIDE, golden.SIDE)),
    )[0].asnumpy()


BLOCK_LAYERS = {  # outputs and inputs in widths of FLUX.1
    **{
        f"transformer_blocks.18.attn.{n}": (1, 1)
        for n in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
    },
    "transformer_blocks.18.attn.to_out.0": (1, 1),
    "transformer_blocks.18.attn.to_add_out": (1, 1),
    "transformer_blocks.18.ff.net.0.proj": (4, 1),
    "transformer_blocks.18.ff_context.net.2": (1, 4),
    "transformer_blocks.18.norm1.linear": (6, 1),
    **{f"single_transformer_blocks.{i}.attn.{n}": (1, 1) for i in (0, 37) for n in ("to_q", "to_k", "to_v")},
    "single_transformer_blocks.37.proj_mlp": (4, 1),
    "single_transformer_blocks.37.proj_out": (1, 5),
    "single_transformer_blocks.37.norm.linear": (3, 1),
}


@pytest.fixture(scope="module")
def wide_lora(tmp_path_factory):
    """A LoRA of FLUX.1's own width, because diffusers' reader of kohya files knows no other; alpha is not the rank."""
    rng = np.random.default_rng(0)
    tensors = {}
    for module, (outputs, inputs) in BLOCK_LAYERS.items():
        tensors[f"transformer.{module}.lora_A.weight"] = rng.standard_normal((4, 3072 * inputs), np.float32) / 4
        tensors[f"transformer.{module}.lora_B.weight"] = rng.standard_normal((3072 * outputs, 4), np.float32) / 4
        tensors[f"transformer.{module}.alpha"] = np.array(10.0, np.float32)
    path = tmp_path_factory.mktemp("wide") / "diffusers.safetensors"
    path.write_bytes(to_bytes(tensors, {"format": "pt"}))
    return path


@pytest.mark.parametrize("format_", ["diffusers", "kohya", "comfyui"])
def test_diffusers_and_mindone_read_the_same_from_every_format(cpu, wide_lora, tmp_path, format_):
    file = tmp_path / f"{format_}.safetensors"
    file.write_bytes(to_bytes(*convert.convert(lora_file.read(wide_lora), format_)))
    x = np.random.default_rng(1).standard_normal(5 * 3072, np.float32)
    there, facts = ask_torch("apply_lora", "-", tmp_path, {"x": x}, lora=str(file))
    assert facts["remarks"] == []
    here = apply_with_mindone(file, x)
    layers = lora_file.read(wide_lora).layers
    # block 0 has no LoRA on proj_mlp: a reader of the fused layer gives it one that adds nothing
    extra = set() if format_ == "diffusers" else {"single_transformer_blocks.0.proj_mlp"}
    for answers in (there, here):
        assert set(answers) == set(layers) | extra
        assert all(not answers[name].any() for name in extra)
        for name, layer in layers.items():
            wanted = layer.scale * (layer.up @ (layer.down @ x[: layer.down.shape[1]]))
            assert np.abs(answers[name] - wanted).max() <= 1e-5 * np.abs(wanted).max(), name


def apply_with_mindone(file, x):
    from mindone.diffusers import FluxPipeline

    state, alphas = FluxPipeline.lora_state_dict(str(file.parent), weight_name=file.name, return_alphas=True)
    answers = {}
    for key, down in state.items():
        if key.endswith(".lora_A.weight"):
            module = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
            low, high = down.asnumpy(), state[key.replace("lora_A", "lora_B")].asnumpy()
            scale = float(alphas[f"transformer.{module}.alpha"]) / low.shape[0] if alphas else 1.0
            answers[module] = scale * (high @ (low @ x[: low.shape[1]]))
    return answers


def test_features_of_dinov2_and_clip_made_again_are_the_same(tmp_path):
    """What tests/score compares DINOv2 and CLIP with."""
    run_torch(program.ROOT / "tests" / "scoring_models.py", tmp_path / "features.json")
    made = json.loads((tmp_path / "features.json").read_text())
    kept = json.loads((program.ROOT / "tests" / "score" / "torch_features.json").read_text())
    assert made.keys() == kept.keys()
    for name in kept.keys() - {"versions"}:
        np.testing.assert_allclose(made[name], kept[name], atol=1e-5, err_msg=name)


def test_reference_files_made_again_are_the_same(tmp_path):
    """Byte for byte on the processor that made them, within golden.SAME on any other."""
    run_torch(program.ROOT / "scripts" / "make_golden.py", tmp_path)
    made, kept = golden.read(tmp_path), golden.read()
    if made.facts["versions"] != kept.facts["versions"]:
        pytest.skip(f"other versions: {made.facts['versions']}")
    assert golden.differences(made, kept) == []
