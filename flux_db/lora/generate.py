"""Pictures from prompts with any number of LoRAs. The prompts are encoded first, in a process that then ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from PIL import Image

from flux_db import child
from flux_db.atomic import write_png
from flux_db.check.model import locate_checked
from flux_db.console import counted, say, stage
from flux_db.data import encode, encode_cache
from flux_db.data.encode_cache import Cache
from flux_db.errors import UserError, unwritable
from flux_db.lora import drawn_with, merge
from flux_db.lora.generate_flags import GRID, GenerateRequest, with_own_flags
from flux_db.lora.merge import Additions
from flux_db.model import int8_linear, loading, runtime
from flux_db.model.device import precision_problem
from flux_db.model.sampler import Request, Sampler, SampleSettings, grid, groups
from flux_db.model.text_encoder import Pooled
from flux_db.png_text import sample_text
from flux_db.progress import progress_bar
from flux_db.settings.derived import is_int8
from flux_db.settings.prompt_lines import PromptLine
from flux_db.settings.schema import Config

# The device's precision -> its name in weight files.
FILE_TYPES = {ms.float32: "F32", ms.float16: "F16", ms.bfloat16: "BF16"}


def run(request: GenerateRequest, argv: Sequence[str]) -> Path:
    """Draw everything; returns the grid's path. `argv` are the flags that the request was read from."""
    additions = merge.read_all(request.loras)  # refused before a model is fetched
    config = _settings(request)
    # a precision that the device does not have is not taken
    precision = config.runtime.mixed_precision
    if taken := [one for one in request.taken if one.flag != "mixed_precision" or one.value == precision]:
        say(f"Taken {drawn_with.described(taken)}")
    model, cache = _open(config)
    if problems := merge.misfits(model, request.loras, additions, beside=is_int8(config)):
        raise UserError(problems)
    try:
        request.output.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise unwritable(f"-o {request.output}: cannot be made", problem) from problem
    if missing := _not_encoded(request, cache):
        say(f"Encoding {counted(len(missing), 'prompt')} in a process of its own; stored in {cache.folder}")
        child.run(child.command("encode-prompts", *argv), "encoding the prompts")
    machine = runtime.start(config.runtime)
    drawn: dict[Path, Image.Image] = {}
    for factor in dict.fromkeys(_factor(line) for line in request.prompts):
        # LoRAs are merged into the weights, so every strength is a transformer of its own, one after the other
        parts = merge.by_part(scaled(additions, factor))
        texts = list(dict.fromkeys(line.text for line in request.prompts if _factor(line) == factor))
        pooled = _pooled(config, model, parts[merge.TEXT_ENCODER], texts) if merge.TEXT_ENCODER in parts else {}
        with stage("Loading the transformer"):
            transformer = loading.load_transformer(model, machine.dtype, config.model.variant, is_int8=is_int8(config))
            add_loras(transformer, parts.get(merge.TRANSFORMER, {}), machine.dtype)
        sampler = Sampler(model, transformer, machine.dtype, config.model.variant, config.validation.vae_tiling)
        drawn |= draw(request, cache, sampler, factor, pooled)
        del sampler, transformer
    pictures = [drawn[path] for path in request.pictures()]
    rows = [pictures[start : start + request.num] for start in range(0, len(pictures), request.num)]
    write_png(request.output / GRID, grid(rows))
    return request.output / GRID


def scaled(additions: Additions, factor: float) -> Additions:
    """All LoRAs with their strengths times a factor."""
    return {name: [(layer, strength * factor) for layer, strength in layers] for name, layers in additions.items()}


def _factor(line: PromptLine) -> float:
    return 1.0 if line.lora is None else line.lora


def encode_prompts(request: GenerateRequest) -> None:
    """`python -m flux_db encode-prompts`: put the request's prompts into the cache."""
    config = _settings(request)
    model, cache = _open(config)
    if missing := _not_encoded(request, cache):
        runtime.start(config.runtime)
        encode.encode_prompts(config, model, cache, missing)


def draw(
    request: GenerateRequest,
    cache: Cache,
    sampler: Sampler,
    factor: float = 1.0,
    pooled: Mapping[str, np.ndarray] | None = None,
) -> dict[Path, Image.Image]:
    """Draw the pictures of the prompts whose LoRAs have this factor into the output folder.

    `pooled`: CLIP's vectors of the prompts, where they are not the stored ones.
    """
    own = {prompt: {"pooled_prompt_embeds": vector} for prompt, vector in (pooled or {}).items()}
    numbered = [(line, number) for line in request.prompts for number in range(request.num)]
    wanted = [(path, *one) for path, one in zip(request.pictures(), numbered, strict=True) if _factor(one[0]) == factor]
    requests = [
        Request(
            **cache.read(cache.prompt_file(line.text)) | own.get(line.text, {}),
            seed=request.seed if line.seed is None else line.seed,
            number=number,
        )
        for _, line, number in wanted
    ]
    usual = SampleSettings(size=request.size, steps=request.steps, guidance=request.guidance)
    drawn: dict[Path, Image.Image] = {}
    with progress_bar(total=len(wanted), desc="drawing", unit="picture") as bar:
        for group in groups([line for _, line, _ in wanted], usual):
            pictures = sampler.draw([requests[i] for i in group.numbers], group.settings)
            for i, picture in zip(group.numbers, pictures, strict=True):
                path, line, number = wanted[i]
                write_png(path, picture, pnginfo=sample_text(line.text, number, requests[i].seed, line.options))
                drawn[path] = picture
                bar.update()
    return drawn


def _pooled(config: Config, model: Path, additions: Additions, prompts: Sequence[str]) -> dict[str, np.ndarray]:
    """CLIP's vectors of the prompts with the LoRAs in it; CLIP is small enough not to need a process of its own."""
    dtype = runtime.DTYPES[encode_cache.text_precision(config)]
    with stage("Encoding prompts with CLIP and its LoRA"):
        clip = loading.load_clip(model, dtype, config.model.variant)
        add_loras(clip, additions, dtype)
        ids = encode.clip_token_ids(loading.load_tokenizers(model)[0], prompts)
        pooled = Pooled(clip)
        return {prompt: pooled.of(row) for prompt, row in zip(prompts, ids, strict=True)}


def add_loras(network: nn.Cell, additions: Additions, dtype: ms.Type) -> None:
    """Merge LoRAs into the loaded weights; before the first call, which compiles them in.

    A matrix of int8 stays as it is, and the LoRAs are computed beside it: rounded to int8, they would be lost."""
    parameters, beside = network.parameters_dict(), int8_linear.layers(network)
    for name, layers in additions.items():
        if name in beside:
            down, up = merge.stacked(layers)
            merge.finite_as(down, FILE_TYPES[dtype], name)
            merge.finite_as(up, FILE_TYPES[dtype], name)
            int8_linear.add_beside(beside[name], down, up, dtype)
            continue
        parameter = parameters[f"{name}.weight"]
        value = merge.merged(parameter.astype(runtime.DTYPES["no"]).asnumpy(), layers)
        merge.finite_as(value, FILE_TYPES[dtype], name)
        parameter.set_data(Tensor(np.ascontiguousarray(value)).astype(dtype))


def _settings(request: GenerateRequest) -> Config:
    """The encoder's settings, with a precision that the device has: the one asked for, the run's, or the usual one."""
    config = request.config
    if request.precision_given:
        return config
    device = runtime.choose_device(config.runtime.device)[0]
    precision = next((one.value for one in request.taken if one.flag == "mixed_precision"), None)
    if precision is None or precision_problem(device, "", precision):
        precision = "bf16" if device == "Ascend" else "no"
    return dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, mixed_precision=precision))


def _open(config: Config) -> tuple[Path, Cache]:
    """The model's folder and the cache of prompts."""
    try:
        model = locate_checked(config)
    except UserError as error:
        raise UserError(with_own_flags(error.problems)) from error
    return model, encode_cache.open_cache(config, model)


def _not_encoded(request: GenerateRequest, cache: Cache) -> list[str]:
    distinct = dict.fromkeys(line.text for line in request.prompts)
    return [prompt for prompt in distinct if cache.read(cache.prompt_file(prompt)) is None]
