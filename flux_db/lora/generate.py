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
from flux_db.console import say, stage
from flux_db.data import encode, encode_cache
from flux_db.data.encode_cache import Cache
from flux_db.errors import UserError, unwritable
from flux_db.lora import merge
from flux_db.lora.generate_flags import GRID, GenerateRequest
from flux_db.lora.merge import Additions
from flux_db.model import loading, runtime
from flux_db.model.sampler import Request, Sampler, SampleSettings, batch_of, grid
from flux_db.model.text_encoder import Pooled
from flux_db.png_text import sample_text
from flux_db.progress import progress_bar
from flux_db.settings.schema import Config

# The device's precision -> its name in weight files.
FILE_TYPES = {ms.float32: "F32", ms.float16: "F16", ms.bfloat16: "BF16"}


def run(request: GenerateRequest, argv: Sequence[str]) -> Path:
    """Draw everything; returns the grid's path. `argv` are the flags that the request was read from."""
    additions = merge.read_all(request.loras)  # refused before a model is fetched
    config, model, cache = _open(request)
    if problems := merge.misfits(model, request.loras, additions):
        raise UserError(problems)
    try:
        request.output.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise unwritable(f"-o {request.output}: cannot be made", problem) from problem
    if missing := _not_encoded(request, cache):
        say(f"Encoding {len(missing)} prompts in a process of its own; stored in {cache.folder}")
        child.run(child.command("encode-prompts", *argv), "encoding the prompts")
    machine = runtime.start(config.runtime)
    parts = merge.by_part(additions)
    pooled = _pooled(config, model, parts[merge.TEXT_ENCODER], request.prompts) if merge.TEXT_ENCODER in parts else {}
    with stage("Loading the transformer"):
        transformer = loading.load_transformer(model, machine.dtype, config.model.variant)
        add_loras(transformer, parts.get(merge.TRANSFORMER, {}), machine.dtype)
    return draw(request, cache, Sampler(model, transformer, machine.dtype, config.model.variant), pooled)


def encode_prompts(request: GenerateRequest) -> None:
    """`python -m flux_db encode-prompts`: put the request's prompts into the cache."""
    config, model, cache = _open(request)
    if missing := _not_encoded(request, cache):
        runtime.start(config.runtime)
        encode.encode_prompts(config, model, cache, missing)


def draw(
    request: GenerateRequest, cache: Cache, sampler: Sampler, pooled: Mapping[str, np.ndarray] | None = None
) -> Path:
    """Draw picture by picture into the output folder, and a grid with a row for each prompt.

    `pooled`: CLIP's vectors of the prompts, where they are not the stored ones.
    """
    own = {prompt: {"pooled_prompt_embeds": vector} for prompt, vector in (pooled or {}).items()}
    requests = [
        Request(**cache.read(cache.prompt_file(prompt)) | own.get(prompt, {}), seed=request.seed, number=number)
        for prompt in request.prompts
        for number in range(request.num)
    ]
    batch = batch_of(request.size, len(requests))
    settings = SampleSettings(size=request.size, steps=request.steps, guidance=request.guidance, batch=batch)
    drawn: list[Image.Image] = []
    pictures = progress_bar(sampler.draw(requests, settings), total=len(requests), desc="drawing", unit="picture")
    prompts = [prompt for prompt in request.prompts for _ in range(request.num)]
    for path, one, prompt, picture in zip(request.pictures(), requests, prompts, pictures, strict=True):
        write_png(path, picture, pnginfo=sample_text(prompt, one.number, one.seed))
        drawn.append(picture)
    rows = [drawn[start : start + request.num] for start in range(0, len(drawn), request.num)]
    write_png(request.output / GRID, grid(rows))
    return request.output / GRID


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
    """Merge LoRAs into the loaded weights; before the first call, which compiles them in."""
    parameters = network.parameters_dict()
    for name, layers in additions.items():
        parameter = parameters[f"{name}.weight"]
        value = merge.merged(parameter.astype(runtime.DTYPES["no"]).asnumpy(), layers)
        merge.finite_as(value, FILE_TYPES[dtype], name)
        parameter.set_data(Tensor(np.ascontiguousarray(value)).astype(dtype))


def _open(request: GenerateRequest) -> tuple[Config, Path, Cache]:
    """The encoder's settings, the model's folder and the cache of prompts."""
    config = request.config
    if not request.precision_given and runtime.choose_device(config.runtime.device)[0] == "Ascend":
        config = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, mixed_precision="bf16"))
    model = locate_checked(config)
    return config, model, encode_cache.open_cache(config, model)


def _not_encoded(request: GenerateRequest, cache: Cache) -> list[str]:
    distinct = dict.fromkeys(request.prompts)
    return [prompt for prompt in distinct if cache.read(cache.prompt_file(prompt)) is None]
