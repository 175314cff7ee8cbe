"""The tensors that a network needs from its weight files, by name and shape, worked out from its config.json: the
networks of FLUX.1, and those that score its samples.

mindone gives a parameter that no file holds a random value and goes on. So the files are compared with this description
first, without MindSpore and within milliseconds; a test holds it against mindone's own classes. The names are those in
the files, which are PyTorch's.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]

# Far beyond any such network. A config.json that asks for more is damaged, and would fill the memory with names.
MOST_LAYERS = 1000
MOST_BLOCKS = 16
WIDEST = 2**24

_SINUSOIDS = 256

# T5's embedding has two names, and files may use either or both.
_TIED = {("text_encoder_2", "encoder.embed_tokens.weight"): "shared.weight"}

# What older or more complete files hold beside: buffers and other halves of the network, which are never used here.
_EXTRAS = {
    "text_encoder": re.compile(r"text_model\.embeddings\.position_ids|text_projection\.weight"),
    "text_encoder_2": re.compile(r"decoder\..*"),
    "clip": re.compile(r"(text|vision)_model\.embeddings\.position_ids"),
}


def expected_weights(part: str, config: Config) -> Shapes:
    """Names and shapes for a network: one of the four of FLUX.1, by the name of its folder, or dinov2 or clip.

    A ValueError names a bad setting."""
    return _NETWORKS[part](config)


def own_name(part: str, name: str) -> str:
    """The name that a tensor has in `expected_weights`, where files may use another one."""
    return _TIED.get((part, name), name)


def is_extra(part: str, name: str) -> bool:
    """Whether a tensor may be in the part's files without being used."""
    return part in _EXTRAS and _EXTRAS[part].fullmatch(name) is not None


# ---- The transformer ----


def _transformer(config: Config) -> Shapes:
    head = _whole(config, "attention_head_dim", 128)
    width = _whole(config, "num_attention_heads", 24) * head
    _check_axes(config, head)
    channels = _whole(config, "in_channels", 64)
    out = channels if config.get("out_channels") is None else _whole(config, "out_channels", channels)
    embedders = {"timestep": _SINUSOIDS, "text": _whole(config, "pooled_projection_dim", 768)}
    if _switch(config, "guidance_embeds", False):
        embedders["guidance"] = _SINUSOIDS
    return _joined(
        *(_embedder(f"time_text_embed.{name}_embedder", size, width) for name, size in embedders.items()),
        _linear("context_embedder", _whole(config, "joint_attention_dim", 4096), width),
        _linear("x_embedder", channels, width),
        *(_double_block(f"transformer_blocks.{i}", width, head) for i in range(_layers(config, "num_layers", 19))),
        *(
            _single_block(f"single_transformer_blocks.{i}", width, head)
            for i in range(_layers(config, "num_single_layers", 38))
        ),
        _linear("norm_out.linear", width, 2 * width),
        _linear("proj_out", width, _whole(config, "patch_size", 1) ** 2 * out),
    )


def _check_axes(config: Config, head: int) -> None:
    """The rotary embedding has no weights, and fails only when the network is first used."""
    axes = config.get("axes_dims_rope", [16, 56, 56])
    sound = isinstance(axes, list) and all(type(axis) is int and axis > 0 and axis % 2 == 0 for axis in axes)
    if not sound or sum(axes) != head:
        raise ValueError(
            f"axes_dims_rope {_shown(axes)}: must be even numbers that add up to attention_head_dim, {head}"
        )


def _embedder(name: str, size: int, width: int) -> Shapes:
    return _joined(_linear(f"{name}.linear_1", size, width), _linear(f"{name}.linear_2", width, width))


def _double_block(name: str, width: int, head: int) -> Shapes:
    projections = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    return _joined(
        _linear(f"{name}.norm1.linear", width, 6 * width),
        _linear(f"{name}.norm1_context.linear", width, 6 * width),
        *(_linear(f"{name}.attn.{projection}", width, width) for projection in projections),
        *(_scale(f"{name}.attn.norm_{which}", head) for which in ("q", "k", "added_q", "added_k")),
        *(_linear(f"{name}.{stream}.net.0.proj", width, 4 * width) for stream in ("ff", "ff_context")),
        *(_linear(f"{name}.{stream}.net.2", 4 * width, width) for stream in ("ff", "ff_context")),
    )


def _single_block(name: str, width: int, head: int) -> Shapes:
    return _joined(
        _linear(f"{name}.norm.linear", width, 3 * width),
        _linear(f"{name}.proj_mlp", width, 4 * width),
        _linear(f"{name}.proj_out", 5 * width, width),
        *(_linear(f"{name}.attn.{projection}", width, width) for projection in ("to_q", "to_k", "to_v")),
        *(_scale(f"{name}.attn.norm_{which}", head) for which in ("q", "k")),
    )


# ---- The text encoders ----


def _clip(config: Config) -> Shapes:
    if config.get("model_type") == "clip":  # of a whole CLIP, whose text half counts
        config = _half(config, "text_config")
    width = _width(config, 512, 8)
    inner = _whole(config, "intermediate_size", 2048)
    return _joined(
        _table("text_model.embeddings.token_embedding", _whole(config, "vocab_size", 49408), width),
        _table("text_model.embeddings.position_embedding", _whole(config, "max_position_embeddings", 77), width),
        *(
            _clip_layer(f"text_model.encoder.layers.{i}", width, inner)
            for i in range(_layers(config, "num_hidden_layers", 12))
        ),
        _norm("text_model.final_layer_norm", width),
    )


def _clip_layer(name: str, width: int, inner: int) -> Shapes:
    return _joined(
        *(_linear(f"{name}.self_attn.{which}_proj", width, width) for which in ("q", "k", "v", "out")),
        _norm(f"{name}.layer_norm1", width),
        _linear(f"{name}.mlp.fc1", width, inner),
        _linear(f"{name}.mlp.fc2", inner, width),
        _norm(f"{name}.layer_norm2", width),
    )


def _t5(config: Config) -> Shapes:
    width, inner = _whole(config, "d_model", 512), _whole(config, "d_ff", 2048)
    heads = _whole(config, "num_heads", 8)
    projected = heads * _whole(config, "d_kv", 64)
    gated = _switch(config, "is_gated_act", _text(config, "feed_forward_proj", "relu").startswith("gated-"))
    buckets = _whole(config, "relative_attention_num_buckets", 32)
    return _joined(
        _table("shared", _whole(config, "vocab_size", 32128), width),
        # the first block's table of distances serves all blocks
        _table("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", buckets, heads),
        *(
            _t5_block(f"encoder.block.{i}", width, projected, inner, gated)
            for i in range(_layers(config, "num_layers", 6))
        ),
        _scale("encoder.final_layer_norm", width),
    )


def _t5_block(name: str, width: int, projected: int, inner: int, gated: bool) -> Shapes:
    attention, feed_forward = f"{name}.layer.0", f"{name}.layer.1"
    return _joined(
        *(_linear(f"{attention}.SelfAttention.{which}", width, projected, bias=False) for which in ("q", "k", "v")),
        _linear(f"{attention}.SelfAttention.o", projected, width, bias=False),
        _scale(f"{attention}.layer_norm", width),
        *(
            _linear(f"{feed_forward}.DenseReluDense.{which}", width, inner, bias=False)
            for which in (("wi_0", "wi_1") if gated else ("wi",))
        ),
        _linear(f"{feed_forward}.DenseReluDense.wo", inner, width, bias=False),
        _scale(f"{feed_forward}.layer_norm", width),
    )


# ---- The networks that score samples ----


def _dinov2(config: Config) -> Shapes:
    width = _width(config, 768, 12)
    inner = width * _whole(config, "mlp_ratio", 4)
    patch = _whole(config, "patch_size", 14)
    positions = (_whole(config, "image_size", 224) // patch) ** 2 + 1
    bias, gated = _switch(config, "qkv_bias", True), _switch(config, "use_swiglu_ffn", False)
    return _joined(
        {"embeddings.cls_token": (1, 1, width), "embeddings.position_embeddings": (1, positions, width)},
        {"embeddings.mask_token": (1, width)} if _switch(config, "use_mask_token", True) else {},
        _conv("embeddings.patch_embeddings.projection", _whole(config, "num_channels", 3), width, kernel=patch),
        *(
            _dinov2_layer(f"encoder.layer.{i}", width, inner, bias=bias, gated=gated)
            for i in range(_layers(config, "num_hidden_layers", 12))
        ),
        _norm("layernorm", width),
    )


def _dinov2_layer(name: str, width: int, inner: int, *, bias: bool, gated: bool) -> Shapes:
    # of the gated kind two thirds are left, in multiples of 8
    half = (int(inner * 2 / 3) + 7) // 8 * 8
    layers = {"weights_in": (width, 2 * half), "weights_out": (half, width)}
    layers = layers if gated else {"fc1": (width, inner), "fc2": (inner, width)}
    return _joined(
        _norm(f"{name}.norm1", width),
        *(
            _linear(f"{name}.attention.attention.{which}", width, width, bias=bias)
            for which in ("query", "key", "value")
        ),
        _linear(f"{name}.attention.output.dense", width, width),
        *({f"{name}.layer_scale{i}.lambda1": (width,)} for i in (1, 2)),
        _norm(f"{name}.norm2", width),
        *(_linear(f"{name}.mlp.{layer}", *sides) for layer, sides in layers.items()),
    )


def _whole_clip(config: Config) -> Shapes:
    """Text and pictures, projected into one space."""
    text, vision = _half(config, "text_config"), _half(config, "vision_config")
    width, patch = _width(vision, 768, 12), _whole(vision, "patch_size", 32)
    inner, projected = _whole(vision, "intermediate_size", 3072), _whole(config, "projection_dim", 512)
    return _joined(
        {"logit_scale": (), "vision_model.embeddings.class_embedding": (width,)},
        _clip(text),
        {"vision_model.embeddings.patch_embedding.weight": (width, _whole(vision, "num_channels", 3), patch, patch)},
        _table(
            "vision_model.embeddings.position_embedding", (_whole(vision, "image_size", 224) // patch) ** 2 + 1, width
        ),
        _norm("vision_model.pre_layrnorm", width),
        *(
            _clip_layer(f"vision_model.encoder.layers.{i}", width, inner)
            for i in range(_layers(vision, "num_hidden_layers", 12))
        ),
        _norm("vision_model.post_layernorm", width),
        _linear("visual_projection", width, projected, bias=False),
        _linear("text_projection", _whole(text, "hidden_size", 512), projected, bias=False),
    )


def _half(config: Config, name: str) -> Config:
    half = config.get(name)
    if not isinstance(half, Mapping):
        raise ValueError(f"{name} must be an object")
    return half


def _width(config: Config, width: int, heads: int) -> int:
    """The network's width, which must be a multiple of its heads: they show in no shape."""
    width = _whole(config, "hidden_size", width)
    heads = _whole(config, "num_attention_heads", heads)
    if width % heads:
        raise ValueError(f"num_attention_heads {heads}: hidden_size {width} is not a multiple of it")
    return width


# ---- The VAE ----


def _vae(config: Config) -> Shapes:
    channels = _channels(config)
    latent = _whole(config, "latent_channels", None)  # the class's default is not FLUX.1's
    resnets = _layers(config, "layers_per_block", 1)
    attention = _switch(config, "mid_block_add_attention", True)
    encoder, decoder = [channels[0], *channels], [channels[-1], *channels[::-1]]
    last = len(channels) - 1
    return _joined(
        _conv("encoder.conv_in", _whole(config, "in_channels", 3), channels[0]),
        *(_resnets(f"encoder.down_blocks.{i}", encoder[i], encoder[i + 1], resnets) for i in range(last + 1)),
        *(_conv(f"encoder.down_blocks.{i}.downsamplers.0.conv", encoder[i + 1], encoder[i + 1]) for i in range(last)),
        _middle("encoder", channels[-1], attention),
        _norm("encoder.conv_norm_out", channels[-1]),
        _conv("encoder.conv_out", channels[-1], 2 * latent),
        _conv("quant_conv", 2 * latent, 2 * latent, kernel=1) if _switch(config, "use_quant_conv", True) else {},
        _conv("post_quant_conv", latent, latent, kernel=1) if _switch(config, "use_post_quant_conv", True) else {},
        _conv("decoder.conv_in", latent, channels[-1]),
        _middle("decoder", channels[-1], attention),
        *(_resnets(f"decoder.up_blocks.{i}", decoder[i], decoder[i + 1], resnets + 1) for i in range(last + 1)),
        *(_conv(f"decoder.up_blocks.{i}.upsamplers.0.conv", decoder[i + 1], decoder[i + 1]) for i in range(last)),
        _norm("decoder.conv_norm_out", channels[0]),
        _conv("decoder.conv_out", channels[0], _whole(config, "out_channels", 3)),
    )


def _channels(config: Config) -> list[int]:
    """The channels of the VAE's blocks; each of them an ordinary block, as in every FLUX.1."""
    channels = config.get("block_out_channels")
    if not isinstance(channels, list) or not 1 <= len(channels) <= MOST_BLOCKS:
        raise ValueError(f"block_out_channels {_shown(channels)}: must be a list of 1 to {MOST_BLOCKS} whole numbers")
    for name, kind in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
        if (given := config.get(name, [kind])) != [kind] * len(channels):
            raise ValueError(f"{name} {_shown(given)}: must be {kind} for each of the {len(channels)} blocks")
    return [_whole({"block_out_channels": channel}, "block_out_channels", None) for channel in channels]


def _resnets(name: str, size: int, out: int, count: int) -> Shapes:
    return _joined(*(_resnet(f"{name}.resnets.{i}", out if i else size, out) for i in range(count)))


def _resnet(name: str, size: int, out: int) -> Shapes:
    return _joined(
        _norm(f"{name}.norm1", size),
        _conv(f"{name}.conv1", size, out),
        _norm(f"{name}.norm2", out),
        _conv(f"{name}.conv2", out, out),
        _conv(f"{name}.conv_shortcut", size, out, kernel=1) if size != out else {},
    )


def _middle(half: str, channels: int, with_attention: bool) -> Shapes:
    attention = f"{half}.mid_block.attentions.0"
    return _joined(
        _resnets(f"{half}.mid_block", channels, channels, 2),
        _norm(f"{attention}.group_norm", channels) if with_attention else {},
        *(
            _linear(f"{attention}.{layer}", channels, channels)
            for layer in (("to_q", "to_k", "to_v", "to_out.0") if with_attention else ())
        ),
    )


_NETWORKS: dict[str, Callable[[Config], Shapes]] = {
    "transformer": _transformer,
    "text_encoder": _clip,
    "text_encoder_2": _t5,
    "vae": _vae,
    "dinov2": _dinov2,
    "clip": _whole_clip,
}


# ---- Layers ----


def _linear(name: str, size: int, out: int, *, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (out, size)} | ({f"{name}.bias": (out,)} if bias else {})


def _conv(name: str, size: int, out: int, *, kernel: int = 3) -> Shapes:
    return {f"{name}.weight": (out, size, kernel, kernel), f"{name}.bias": (out,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _scale(name: str, width: int) -> Shapes:
    """A norm without a bias."""
    return {f"{name}.weight": (width,)}


def _table(name: str, rows: int, width: int) -> Shapes:
    return {f"{name}.weight": (rows, width)}


def _joined(*parts: Shapes) -> Shapes:
    return {name: shape for part in parts for name, shape in part.items()}


# ---- Settings: what is absent has the default of the network's class ----


def _whole(config: Config, name: str, default: int | None, least: int = 1, most: int = WIDEST) -> int:
    value = config.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} {_shown(value)}: must be a whole number from {least} to {most}")
    return value


def _layers(config: Config, name: str, default: int) -> int:
    return _whole(config, name, default, most=MOST_LAYERS)


def _switch(config: Config, name: str, default: bool) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} {_shown(value)}: must be true or false")
    return value


def _text(config: Config, name: str, default: str) -> str:
    value = config.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name} {_shown(value)}: must be a text")
    return value


def _shown(value: object) -> str:
    """Cut, because it may be of any length or depth."""
    return reprlib.repr(value)
