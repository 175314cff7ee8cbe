"""FLUX.1-dev's settings, as the config.json of its parts have them: for the plan of a run where the model is not."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "transformer": {
        "num_layers": 19,
        "num_single_layers": 38,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "axes_dims_rope": [16, 56, 56],
        "in_channels": 64,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
    },
    "text_encoder": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 49408,
        "max_position_embeddings": 77,
    },
    "text_encoder_2": {
        "d_model": 4096,
        "d_kv": 64,
        "num_heads": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "vocab_size": 32128,
        "feed_forward_proj": "gated-gelu",
    },
    "vae": {
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 2,
        "latent_channels": 16,
        "norm_num_groups": 32,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
}
