"""Both LoRAs, the transformer's and CLIP's, live and both ways: MindSpore here, diffusers on torch there."""

import dataclasses
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from torch_link import ask_torch, draw_here
from world import PROMPT, metrics, train

from flux_db.data import batches, encode, encode_cache
from flux_db.lora import convert, generate, lora_file, merge
from flux_db.model import adapter, loading, optim
from flux_db.model.sampler import Request
from flux_db.model.text_encoder import Pooled
from flux_db.settings.derived import text_lora
from flux_db.settings.lora_layers import layer_names
from flux_db.settings.schema import to_flat_dict
from flux_db.stream import BatchLayout, Purpose, generator
from flux_db.training import build
from flux_db.training.prepare import prepare
from flux_db.weight_file import to_bytes

STEPS = 20
SETTINGS = {
    "rank": 4,
    "train_text_encoder": True,
    "text_encoder_rank": 2,
    "text_encoder_layers": "all",
    "text_encoder_lr": 2e-3,
    "max_train_steps": STEPS,
    "train_batch_size": 2,
    "caption_dropout": 0.3,
}


@pytest.fixture(scope="module", params=[None, 6.0], ids=["alpha is the rank", "alpha is not the rank"])
def run(request, cpu, world, tmp_path_factory):
    output = tmp_path_factory.mktemp("both") / "run"
    config = world.config(output, **SETTINGS, lora_alpha=request.param)
    assert train(config) == 0
    return config


def file_of(config):
    return Path(config.output.output_dir, "pytorch_lora_weights.safetensors")


@pytest.fixture(scope="module")
def there(run, cpu, world, tmp_path_factory):
    """The same training by diffusers on torch: (its numbers, its LoRA file)."""
    folder = tmp_path_factory.mktemp("there")
    model, cache, dataset, _ = prepare(run, cpu)
    source = batches.BatchSource(
        config=run,
        dataset=dataset,
        cache=cache,
        layout=BatchLayout(batch=run.optim.train_batch_size),
        latent_shape=build.latent_shape(run, model),
        learning_rates=optim.learning_rates(run.optim, STEPS, 1.0, run.text_encoder),
        sigmas=np.linspace(1.0, 0.001, 1000),
    )
    arrays = {
        f"{number}/{'ids' if name == 'pooled_prompt_embeds' else name}": value
        for number in range(STEPS)
        for name, value in source[number]._asdict().items()
        if value is not None
    }
    transformer, clip = loading.load_transformer(model, ms.float32), loading.load_clip(model, ms.float32)
    adapter.inject(transformer, run.lora, run.output.seed)
    adapter.inject_text_encoder(clip, text_lora(run), run.output.seed)
    settings = {}
    for prefix, network, lora in (("transformer", transformer, run.lora), ("text_encoder", clip, text_lora(run))):
        start = {f"{prefix}.{name}.weight": p.asnumpy() for name, p in adapter.parameters(network).items()}
        arrays |= {f"start/{prefix}/{name}": value for name, value in start.items()}
        settings[prefix] = {"layers": layer_names(lora), "rank": lora.rank, "alpha": lora.alpha}
    numbers, _ = ask_torch(
        "train_both",
        model,
        folder,
        arrays,
        steps=STEPS,
        optimizer=to_flat_dict(run),
        loss={"scheme": run.loss.weighting_scheme, "guidance_scale": run.loss.guidance_scale},
        save_to=str(folder / "lora"),
        **settings,
    )
    return numbers, folder / "lora" / "pytorch_lora_weights.safetensors"


def test_20_steps_of_both_parts_are_the_same(run, there):
    numbers, _ = there
    rows = metrics(Path(run.output.output_dir))
    loss, norm = (np.array([row[name] for row in rows]) for name in ("loss", "grad_norm"))
    errors = np.abs(loss / numbers["loss"] - 1).max(), np.abs(norm / numbers["norm"] - 1).max()
    layers = lora_file.read(file_of(run)).layers
    mine = convert.name_tensors(layers, "diffusers", alphas=False)
    theirs = {n.removeprefix("weights/"): value for n, value in numbers.items() if n.startswith("weights/")}
    assert mine.keys() == theirs.keys() and sum(n.startswith("text_encoder.") for n in mine) == 24
    text = max(np.abs(mine[n] - theirs[n]).max() for n in mine if n.startswith("text_encoder."))
    rest = max(np.abs(mine[n] - theirs[n]).max() for n in mine if n.startswith("transformer."))
    print(f"loss {errors[0]:.1e}, norm {errors[1]:.1e}, weights of CLIP {text:.1e}, of the transformer {rest:.1e}")
    assert errors[0] <= 1e-5 and errors[1] <= 1e-3
    assert text <= 1e-3 and rest <= 1e-3


def request_for(config, model):
    cache = encode_cache.open_cache(config, model)
    return Request(**cache.read(cache.prompt_file(PROMPT)), seed=5, number=0)


def here(model, config, file):
    """(CLIP's vector, picture) with a LoRA file, as generate computes them."""
    parts = merge.by_part(merge.read_all([merge.Weighted(file)]) if file else {})
    clip, transformer = loading.load_clip(model, ms.float32), loading.load_transformer(model, ms.float32)
    generate.add_loras(clip, parts.get("text_encoder", {}), ms.float32)
    generate.add_loras(transformer, parts.get("transformer", {}), ms.float32)
    pooled = Pooled(clip).of(encode.clip_token_ids(loading.load_tokenizers(model)[0], [PROMPT])[0])
    request = dataclasses.replace(request_for(config, model), pooled_prompt_embeds=pooled)
    return pooled, draw_here(model, transformer, request)


def draw_there(config, model, folder, file):
    request = request_for(config, model)
    arrays = {
        "prompt_embeds": request.prompt_embeds,
        "ids": encode.clip_token_ids(loading.load_tokenizers(model)[0], [PROMPT]),
        "noise": generator(request.seed, request.number, Purpose.SAMPLE).standard_normal((16, 8, 8), np.float32),
    }
    return ask_torch("draw_both", model, folder, arrays, lora=str(file))


@pytest.mark.parametrize("source", ["trained here", "trained there"])
def test_a_lora_draws_the_same_picture_on_both_sides(run, there, world, tmp_path, source):
    file = file_of(run) if source == "trained here" else there[1]
    found, facts = draw_there(run, world.model, tmp_path, file)
    assert facts["remarks"] == []
    weights = convert.name_tensors(lora_file.read(file).text_layers, "diffusers", alphas=False)
    loaded = {name.removeprefix("loaded/"): v for name, v in found.items() if name.startswith("loaded/")}
    assert loaded.keys() == weights.keys() and all(np.array_equal(loaded[n], weights[n]) for n in weights)
    bare, with_lora = here(world.model, run, None), here(world.model, run, file)
    errors = [
        np.abs(mine - found[f"{name}/{what}"]).max()
        for name, pair in (("bare", bare), ("with_lora", with_lora))
        for what, mine in zip(("pooled", "picture"), pair, strict=True)
    ]
    effect = np.abs(with_lora[0] - bare[0]).max()
    print(f"{source}: pooled {max(errors[::2]):.1e}, picture {max(errors[1::2]):.1e}; effect on pooled {effect:.1e}")
    assert effect > 1e-2 and max(errors[::2]) <= 2e-5 and max(errors[1::2]) <= 2e-4


def test_diffusers_reads_clips_layers_from_kohyas_format(run, world, tmp_path):
    """Under the older prefix: diffusers 0.35.2 silently leaves out lora_te1_. And only CLIP's: its reader of the
    transformer's kohya layers knows FLUX.1's own width alone."""
    layers = lora_file.read(file_of(run)).text_layers
    only_text = tmp_path / "text.safetensors"
    only_text.write_bytes(to_bytes(convert.name_tensors(layers, "diffusers"), {"format": "pt"}))
    tensors, about = convert.convert(lora_file.read(only_text), "kohya")
    kohya = tmp_path / "kohya.safetensors"
    kohya.write_bytes(to_bytes({n.replace("lora_te1_", "lora_te_"): value for n, value in tensors.items()}, about))
    found, _ = draw_there(run, world.model, tmp_path, kohya)
    pooled = here(world.model, run, only_text)[0]
    assert np.abs(found["with_lora/pooled"] - pooled).max() <= 2e-5 < np.abs(found["bare/pooled"] - pooled).max()
