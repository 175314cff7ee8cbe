"""What a run takes on each device, computed from its settings and the model's config.json before anything is loaded.

A formula counts what is in memory at a time, in each stage of a run: training, drawing samples, encoding. Its numbers
of tensors are those of the compiled graph, with which scripts/check_plan.py compares them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flux_db.data.encode import pictures_at_once
from flux_db.data.encode_cache import text_precision
from flux_db.errors import UserError
from flux_db.model import flux_dev, int8
from flux_db.model.expected_weights import Shapes, expected_weights
from flux_db.model.model_folder import NETWORKS, read_config
from flux_db.model.vae_tiles import TILE, is_tiled
from flux_db.settings import lora_layers
from flux_db.settings.derived import is_int8, recomputed, sample_prompts, text_lora, validation_size
from flux_db.settings.preserved import is_preserved
from flux_db.settings.schema import Config, LoraConfig
from flux_db.size import PIXELS_PER_TOKEN, Size, drawn_at_once
from flux_db.weight_file import Share

ITEM_BYTES = {"no": 4, "fp16": 2, "bf16": 2}
FLOAT = 4

# The memory of cards, in GB.
CARDS = (64, 32)

# Above this share of a card a plan says so: its formulas are not exact.
TIGHT = 0.9

# Of CANN and MindSpore on a device before there is a tensor, and of the links with several devices. Not measured.
RUNTIME_BYTES, LINK_BYTES = 1_500_000_000, 400_000_000

# Rows of a third kind that --preserve_class adds to each batch.
PRESERVED_ROWS = 3

# Vectors of the LoRA's length in float32 that an update has in memory at a time.
UPDATE_VECTORS = 5

# Tensors of [tokens, width] that the backward pass reads of a block that is not computed again: its input, queries and
# keys before their norm, queries, keys, values and result of the attention, and the feed-forward of four times the
# width before and after GELU; in a double block, its middle too.
FIXED = {"double": 16, "single": 15}
# What is kept only because a LoRA is in one of these layers: their input, as multiples of the width.
INPUTS = {
    "double": (
        (("attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), 1),
        (("attn.to_out.0", "attn.to_add_out"), 1),
        (("ff.net.0.proj", "ff_context.net.0.proj"), 1),
    ),
    "single": ((("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), 1), (("proj_out",), 5)),
}
# Of them, in the attention: left out if only that is computed again.
IN_ATTENTION = {"double": 7, "single": 6}


class Working(NamedTuple):
    """What is in memory at a moment: vectors of the width for each token, and matrices in squares of the width."""

    image: float
    text: float
    whole: float = 0.0
    """Of an int8 base only."""


# Beside the kept ones at the worst moment of the backward pass, in a block that is computed again, or is not, by the
# liveness of a graph with two blocks of each kind. For an int8 base another moment can be the worst: that with the
# largest matrix in the type of the activations, one of the feed-forward, and in the forward a single block's last.
AGAIN = (Working(43.1, 35.5), Working(40.2, 35.0, whole=4))
STRAIGHT = (Working(22.8, 18.0), Working(20.1, 15.4, whole=4.1))
# In a block without gradients.
FORWARD = (Working(11.2, 11.2), Working(7.25, 7.25, whole=5))


class Item(NamedTuple):
    """A row of a plan."""

    stage: str
    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of the networks."""

    settings: Mapping[str, Mapping[str, Any]]
    shapes: Mapping[str, Shapes]
    is_here: bool
    """False: FLUX.1-dev's sizes were taken, because the model is not on this machine."""

    @property
    def width(self) -> int:
        return self.shapes["transformer"]["x_embedder.weight"][0]

    @property
    def heads(self) -> int:
        return self.settings["transformer"].get("num_attention_heads", 24)

    def blocks(self, kind: str) -> int:
        names = {"double": ("num_layers", 19), "single": ("num_single_layers", 38)}
        return self.settings["transformer"].get(*names[kind])

    @property
    def channels(self) -> list[int]:
        """Of the VAE, from the outermost level."""
        return list(self.settings["vae"]["block_out_channels"])


def read_model(config: Config, folder: Path | None = None) -> Model:
    """By the config.json of each part; FLUX.1-dev's where there is no such folder. A ValueError or UserError says that
    they make no sense.

    `folder`: of the model, where it is not the one in the settings because it comes from the hub."""
    folder = folder or Path(config.model.pretrained_model_name_or_path)
    is_here = os.path.isdir(folder)
    settings = {part: read_config(folder, part) if is_here else flux_dev.SETTINGS[part] for part in NETWORKS}
    shapes = {part: expected_weights(part, own) for part, own in settings.items()}
    return Model(settings=settings, shapes=shapes, is_here=is_here)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes on each device, by stage."""

    items: tuple[Item, ...]

    def of(self, stage: str) -> list[Item]:
        return [item for item in self.items if item.stage == stage]

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(item.stage for item in self.items))

    def total(self, stage: str) -> int:
        return sum(item.bytes for item in self.of(stage))

    @property
    def peak(self) -> int:
        return max(map(self.total, self.stages))

    @property
    def worst(self) -> str:
        """The stage that takes most."""
        return max(self.stages, key=self.total)

    def fits(self, card: int) -> bool:
        return self.peak <= card * 10**9


TRAINING, SAMPLES, ENCODING = "training", "drawing samples", "encoding"


def budget(config: Config, model: Model, devices: int, sizes: Mapping[Size, int] | list[Size] | None = None) -> Budget:
    """`sizes`: of the training pictures; without them squares of --resolution."""
    resident = list(_resident(config, model, devices))
    largest = max(sizes or [Size.square(config.data.resolution)], key=lambda size: size.height * size.width)
    items = [Item(TRAINING, name, size) for name, size in [*resident, *_training(config, model, devices, largest)]]
    if sample_prompts(config):
        items += [Item(SAMPLES, name, size) for name, size in [*resident, *_samples(config, model)]]
    items += [Item(ENCODING, name, size) for name, size in _encoding(config, model, largest)]
    return Budget(items=tuple(items))


# --- what stays ---------------------------------------------------------------------------------------------------


def _resident(config: Config, model: Model, devices: int) -> Iterator[tuple[str, int]]:
    count = trained_parameters(config, model)
    yield "runtime", RUNTIME_BYTES
    yield "transformer", transformer_bytes(config, model.shapes["transformer"], devices)
    yield "LoRA", count * (FLOAT + _lora_item(config))
    yield "optimizer", count * FLOAT * state_vectors(config)
    if config.text_encoder.train_text_encoder:
        yield "CLIP", _elements(model, "text_encoder") * ITEM_BYTES[text_precision(config)]
    if sample_prompts(config) or not config.data.cache_latents:
        yield "VAE", _elements(model, "vae") * FLOAT
    if devices > 1:
        yield "all-reduce", count * FLOAT + LINK_BYTES


def transformer_bytes(config: Config, shapes: Shapes, devices: int) -> int:
    """What one process keeps of the transformer's weights."""
    share = Share(0, devices if config.runtime.shard_base else 1)
    return sum(_tensor_bytes(config, name, shape, share) for name, shape in shapes.items())


def _tensor_bytes(config: Config, name: str, shape: tuple[int, ...], share: Share) -> int:
    item = ITEM_BYTES[config.runtime.mixed_precision]
    parts = share.count if len(shape) == 2 and share.divides(shape) else 1  # vectors stay whole
    if is_int8(config) and int8.is_matrix(name, shape):
        return math.prod(shape) // parts + shape[0] * item
    return math.prod(shape) * item // parts


def trained_parameters(config: Config, model: Model) -> int:
    count = lora_parameters(config.lora, model.shapes["transformer"])
    if (text := text_lora(config)) is not None:
        count += lora_parameters(text, model.shapes["text_encoder"])
    return count


def lora_parameters(lora: LoraConfig, shapes: Shapes) -> int:
    linear = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if _is_linear(name, shape)}
    return sum(lora_layers.rank_of(lora, name) * sum(linear[name]) for name in lora_layers.chosen(lora, linear))


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith(".weight") and len(shape) == 2 and "embedding" not in name.split(".")[-2]


def _lora_item(config: Config) -> int:
    return FLOAT if config.lora.lora_compute == "fp32" else ITEM_BYTES[config.runtime.mixed_precision]


def state_vectors(config: Config) -> int:
    """Vectors of the LoRA's length: moments, Prodigy's two, the average, the window of accumulated gradients, rates."""
    optim = config.optim
    count = 4 if optim.optimizer == "prodigy" else 2
    count += optim.ema_decay is not None
    count += optim.gradient_accumulation_steps > 1
    return count + lora_layers.has_rate_factors(optim)


def _elements(model: Model, part: str) -> int:
    return sum(map(math.prod, model.shapes[part].values()))


# --- training -----------------------------------------------------------------------------------------------------


def _training(config: Config, model: Model, devices: int, size: Size) -> Iterator[tuple[str, int]]:
    kept, block, update = (
        kept_bytes(config, model, size),
        block_bytes(config, model, size),
        UPDATE_VECTORS * FLOAT * trained_parameters(config, model),
    )
    yield "kept activations", kept
    if config.runtime.shard_base and devices > 1:
        yield "gathered layer", max(map(math.prod, model.shapes["transformer"].values())) * _item(config)
    if not config.data.cache_latents:
        block = max(block, vae_encode_bytes(model, size, config.optim.train_batch_size))
    # the update begins when the activations are gone
    gradients = trained_parameters(config, model) * _lora_item(config)
    yield "largest block, or the update", max(block + gradients, update - kept)


def _item(config: Config) -> int:
    return ITEM_BYTES[config.runtime.mixed_precision]


def token_rows(config: Config, size: Size) -> int:
    """Tokens of text and picture, times the rows of a micro-batch."""
    return _rows(config) * (config.data.max_sequence_length + _image_tokens(size))


def _rows(config: Config) -> int:
    rows = config.optim.train_batch_size * (2 if config.data.with_prior_preservation else 1)
    return rows * (PRESERVED_ROWS if is_preserved(config) else 1)


def _image_tokens(size: Size) -> int:
    return (size.height // PIXELS_PER_TOKEN) * (size.width // PIXELS_PER_TOKEN)


def kept_bytes(config: Config, model: Model, size: Size) -> int:
    """What is in memory between forward and backward."""
    tokens = token_rows(config, size)
    rotary = 2 * (config.data.max_sequence_length + _image_tokens(size)) * model.width // model.heads * FLOAT
    end = _rows(config) * _image_tokens(size) * model.width * _item(config)  # the last block's result, of the picture
    return round(sum(_kept_by_block(config, model, kind, number) for kind, number in _every_block(model)) * tokens) + (
        rotary + end
    )


def _every_block(model: Model) -> Iterator[tuple[str, int]]:
    """(kind, number of the block in the order of the transformer)"""
    for number in range(model.blocks("double") + model.blocks("single")):
        yield ("double" if number < model.blocks("double") else "single"), number


def _kept_by_block(config: Config, model: Model, kind: str, number: int) -> float:
    """Bytes for each token."""
    choice = recomputed(config)
    one = model.width * _item(config)
    if choice is None or choice.cells == "none" or (choice.count is not None and number >= choice.count):
        return whole_block(config, model, kind)
    if choice.cells == "attention":
        return whole_block(config, model, kind) - IN_ATTENTION[kind] * one - _attention_sums(model)
    return one


def whole_block(config: Config, model: Model, kind: str) -> float:
    """Bytes for each token that the backward pass reads of a block."""
    choice, item = lora_layers.parse(config.lora.lora_layers), _item(config)
    first = f"{lora_layers.BLOCKS[kind]}.{choice.blocks[0].first if choice.blocks else 0}"
    inputs = sum(times for names, times in INPUTS[kind] if any(choice.takes(f"{first}.{name}") for name in names))
    layers = sum(choice.takes(f"{first}.{name}") for names, _ in INPUTS[kind] for name in names)
    # in a double block a token passes the layers of its own stream
    layers = (layers + 2) / 2 if kind == "double" else layers
    low = layers * config.lora.rank * _lora_item(config)
    return (FIXED[kind] + inputs) * model.width * item + low + _attention_sums(model)


def _attention_sums(model: Model) -> int:
    """Bytes of the softmax's two sums for each token, which flash attention keeps eight times."""
    return model.heads * 8 * 2 * FLOAT


def block_bytes(config: Config, model: Model, size: Size) -> int:
    """What is in memory beside at the worst moment of the backward pass."""
    choice = recomputed(config)
    again = choice is not None and choice.cells == "blocks"
    return working_bytes(config, model, size, _rows(config), AGAIN if again else STRAIGHT)


def working_bytes(config: Config, model: Model, size: Size, rows: int, moments: tuple[Working, ...]) -> int:
    """At the worst of these moments."""

    def at(moment: Working) -> float:
        tokens = moment.image * _image_tokens(size) + moment.text * config.data.max_sequence_length
        return (rows * tokens + (moment.whole * model.width if is_int8(config) else 0)) * model.width * _item(config)

    return round(max(map(at, moments)))


# --- samples and encoding -----------------------------------------------------------------------------------------

# Tensors of a picture's size that the VAE has at a time in its widest layers: input, norm, sigmoid and product.
VAE_TENSORS = 4


def _samples(config: Config, model: Model) -> Iterator[tuple[str, int]]:
    size = validation_size(config)
    yield "sampler, or VAE decode", max(forward_bytes(config, model, size), vae_decode_bytes(config, model, size))


def forward_bytes(config: Config, model: Model, size: Size) -> int:
    """A pass without gradients, of as many pictures as are drawn at a time."""
    pictures = drawn_at_once(size, len(sample_prompts(config)) * config.validation.num_validation_images)
    return working_bytes(config, model, size, pictures, FORWARD)


def vae_decode_bytes(config: Config, model: Model, size: Size) -> int:
    """One picture at a time, in float32: its last level begins with the channels of the level before."""
    if is_tiled(config.validation.vae_tiling, *size):
        side = TILE * 2 ** (len(model.channels) - 1)
        size = Size(min(side, size.height), min(side, size.width))
    return _vae_bytes(model.channels[min(1, len(model.channels) - 1)], size)


def vae_encode_bytes(model: Model, size: Size, pictures: int) -> int:
    return _vae_bytes(model.channels[0], size) * pictures


def _vae_bytes(channels: int, size: Size) -> int:
    return VAE_TENSORS * channels * size.height * size.width * FLOAT


def _encoding(config: Config, model: Model, size: Size) -> Iterator[tuple[str, int]]:
    """T5 with CLIP, then the VAE, in a process of its own before training."""
    heads = model.settings["text_encoder_2"].get("num_heads", 8)
    # scores of the attention before and after the softmax, and the bias of relative positions
    texts = text_encoder_bytes(config, model) + 3 * heads * config.data.max_sequence_length**2 * FLOAT
    pictures = _elements(model, "vae") * FLOAT + vae_encode_bytes(model, size, pictures_at_once(size, "Ascend"))
    yield "runtime", RUNTIME_BYTES
    yield "T5 and CLIP, or the VAE", max(texts, pictures)


def text_encoder_bytes(config: Config, model: Model) -> int:
    """Of T5's and CLIP's weights."""
    return (
        sum(_elements(model, part) for part in ("text_encoder_2", "text_encoder")) * ITEM_BYTES[text_precision(config)]
    )


# --- the answer ------------------------------------------------------------------------------------------------------


def verdict(config: Config, model: Model, devices: int, sizes: list[Size] | None = None) -> str:
    """In one line: what each device takes, and which cards hold it."""
    found = budget(config, model, devices, sizes)
    cards = ", ".join(f"{answer(found, card)} into {card} GB" for card in CARDS)
    return f"about {found.peak / 1e9:.1f} GB on each Ascend device, most while {found.worst}: {cards}"


def answer(found: Budget, card: int) -> str:
    if not found.fits(card):
        return "does not fit"
    return "fits" if found.peak <= TIGHT * card * 10**9 else "fits only just"


def device_line(
    config: Config, devices: int, sizes: list[Size] | None = None, folder: Path | None = None
) -> str | None:
    """The verdict; None if the model's settings make no sense, which is reported elsewhere."""
    try:
        return verdict(config, read_model(config, folder), devices, sizes)
    except (ValueError, KeyError, UserError):
        return None
