"""The names of FLUX.1's layers in the two worlds of LoRA files.

diffusers has a layer for each projection. Black Forest Labs' own code, whose names kohya and ComfyUI use, has q, k and
v (in single blocks the first feed-forward layer as well) in one fused layer.

The layers of CLIP's text model are the same in both: `text_encoder.text_model.encoder.layers.0.self_attn.q_proj` in
diffusers and here, `lora_te1_text_model_encoder_layers_0_self_attn_q_proj` in kohya's files and ComfyUI's.
"""

from __future__ import annotations

import re

# Fused name -> diffusers' names of its parts, in the order of the fused layer's outputs.
DOUBLE_BLOCK = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn.proj": ("attn.to_out.0",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "img_mod.lin": ("norm1.linear",),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn.proj": ("attn.to_add_out",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
    "txt_mod.lin": ("norm1_context.linear",),
}
SINGLE_BLOCK = {
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation.lin": ("norm.linear",),
}
OUTSIDE = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    "final_layer.linear": ("proj_out",),
}

# Its outputs are shift and scale here, scale and shift in diffusers.
SWAPPED = "final_layer.adaLN_modulation.1"

# (prefix of a block's layers, fused; the same in diffusers; the layers of a block)
_BLOCKS = (
    ("double_blocks", "transformer_blocks", DOUBLE_BLOCK),
    ("single_blocks", "single_transformer_blocks", SINGLE_BLOCK),
)

# 007 would be another name for block 7.
_NUMBER = "(0|[1-9][0-9]{0,3})"


TEXT_ENCODER = "text_encoder."

# How CLIP's layers begin in files -> the format.
TEXT_PREFIXES = {TEXT_ENCODER: "diffusers", "lora_te1_": "kohya", "text_encoders.clip_l.transformer.": "comfyui"}

_TEXT_BLOCK = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")


def is_text(name: str) -> bool:
    """Whether it is a layer of CLIP's text model, by its name here."""
    return name.startswith(TEXT_ENCODER) and text_name(name) is not None


def text_name(module: str) -> tuple[str, str] | None:
    """(prefix, name here) of a layer of CLIP's text model, as a file calls it; None if it is none."""
    for prefix in TEXT_PREFIXES:
        separator = "_" if prefix.endswith("_") else "."
        begin = separator.join(("text_model", "encoder", "layers"))
        if match := re.fullmatch(
            re.escape(f"{prefix}{begin}{separator}") + rf"{_NUMBER}{re.escape(separator)}(.+)", module
        ):
            found = next((layer for layer in _TEXT_BLOCK if layer.replace(".", separator) == match[2]), None)
            return found and (prefix, f"{TEXT_ENCODER}text_model.encoder.layers.{match[1]}.{found}")
    return None


def parts_of(fused: str) -> tuple[str, ...] | None:
    """diffusers' names of the layers that a fused one holds; None if FLUX.1 has no layer of that name."""
    if is_text(fused):
        return (fused,)
    if fused in OUTSIDE:
        return OUTSIDE[fused]
    for here, there, table in _BLOCKS:
        match = re.fullmatch(rf"{here}\.{_NUMBER}\.(.+)", fused)
        if match and match[2] in table:
            return tuple(f"{there}.{match[1]}.{part}" for part in table[match[2]])
    return None


def fused_of(part: str) -> str | None:
    """The fused layer that holds one of diffusers'; None if FLUX.1 has no layer of that name."""
    if is_text(part):
        return part
    for fused, parts in OUTSIDE.items():
        if part in parts:
            return fused
    for here, there, table in _BLOCKS:
        if match := re.fullmatch(rf"{there}\.{_NUMBER}\.(.+)", part):
            return next((f"{here}.{match[1]}.{fused}" for fused, parts in table.items() if match[2] in parts), None)
    return None


def with_dots(name: str) -> str:
    """`double_blocks_0_img_attn_qkv` -> `double_blocks.0.img_attn.qkv`, for both worlds; what is unknown stays."""
    for fused, parts in OUTSIDE.items():
        for known in (fused, *parts):
            if name == known.replace(".", "_"):
                return known
    for here, there, table in _BLOCKS:
        for prefix, layers in ((here, table), (there, [part for parts in table.values() for part in parts])):
            if match := re.fullmatch(rf"{prefix}_{_NUMBER}_(.+)", name):
                return next((f"{prefix}.{match[1]}.{n}" for n in layers if match[2] == n.replace(".", "_")), name)
    return name
