"""A small FLUX.1 made on the spot: a complete model folder in diffusers layout, offline and byte for byte repeatable.

It has every part and every kind of parameter of FLUX.1-dev, only narrower and shallower. The sizes tiny and mid have
random weights; small has learned the drawn world (world.py), and its weights are stored in the package. The folder is
made without MindSpore or torch, and a test can hold it against either.
"""

import hashlib
import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from safetensors.numpy import save as safetensors_bytes
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from flux_db import atomic
from flux_db.errors import UserError, unwritable
from flux_db.model.expected_weights import expected_weights

Size = Literal["tiny", "mid", "small"]
Config = dict[str, Any]

# Raise it whenever the bytes written for a given size and seed change.
SCHEMA = 1

DIFFUSERS_VERSION = "0.35.2"
TRANSFORMERS_VERSION = "4.57.1"

MODEL_INDEX: Config = {
    "_class_name": "FluxPipeline",
    "_diffusers_version": DIFFUSERS_VERSION,
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}

SCHEDULER: Config = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "_diffusers_version": DIFFUSERS_VERSION,
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}

TRANSFORMER: dict[Size, Config] = {
    "tiny": {
        "num_layers": 2,
        "num_single_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "axes_dims_rope": [4, 6, 6],
    },
    # The head size and rotary axes of FLUX.1-dev itself.
    "mid": {
        "num_layers": 2,
        "num_single_layers": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 128,
        "axes_dims_rope": [16, 56, 56],
    },
    "small": {
        "num_layers": 2,
        "num_single_layers": 4,
        "num_attention_heads": 6,
        "attention_head_dim": 32,
        "axes_dims_rope": [8, 12, 12],
    },
}
# The two text encoders differ in width, so that a mix-up fails on its shape.
CLIP: dict[Size, Config] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2},
    "mid": {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 2, "num_hidden_layers": 2},
    "small": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2},
}
T5: dict[Size, Config] = {
    "tiny": {"d_model": 48, "d_kv": 16, "num_heads": 3, "d_ff": 120, "num_layers": 2},
    "mid": {"d_model": 192, "d_kv": 64, "num_heads": 3, "d_ff": 480, "num_layers": 4},
    "small": {"d_model": 192, "d_kv": 32, "num_heads": 6, "d_ff": 384, "num_layers": 3},
}
VAE: dict[Size, Config] = {
    "tiny": {"block_out_channels": [8, 8, 16, 16], "layers_per_block": 1, "norm_num_groups": 4},
    "mid": {"block_out_channels": [32, 64, 64, 64], "layers_per_block": 1, "norm_num_groups": 16},
    # Its latents have a quarter of the picture's side, not an eighth, which is crisper at 64 px.
    "small": {
        "block_out_channels": [24, 48, 64],
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "sample_size": 64,
        "latent_channels": 8,
        "scaling_factor": 1.2918,
        "shift_factor": -0.0114,
    },
}

# Each of these words is one token for both tokenizers; everything else is spelled in letters.
WORDS = """
a an the of in on at with and or to from by for near under over behind beside is are this that my his her its two three
photo picture image painting drawing sketch portrait cartoon illustration render poster close up shot view style
sks dog cat puppy kitten bird horse bear fox rabbit toy plush teapot vase backpack shoe boot candle clock can bowl robot
man woman boy girl person child face eye hand head hair
red orange yellow green blue purple pink brown black white grey gold silver bright dark light colorful
big small little tiny large old new young happy sad cute beautiful funny fluffy shiny wooden
beach sea water river lake mountain forest tree grass flower garden park city street house room kitchen table chair bed
floor wall window door snow sand sky cloud sun moon star night day sunset sunrise rain summer winter
sitting standing running sleeping jumping playing eating swimming flying wearing holding looking
hat scarf ball bucket box book boat car train bicycle
high quality detailed realistic oil watercolor vintage background
"""
# Only the small model has these.
MORE_WORDS = "meadow desert collar cup woods stars indoors ink zwx"


def write_tiny_model(folder: Path, size: Size, seed: int = 0) -> None:
    """Write the model folder, whole or not at all. A folder that already holds exactly this model is left alone."""
    if size not in get_args(Size):
        raise UserError(f"--size {size}: must be one of {', '.join(get_args(Size))}")
    if size == "small" and seed:
        raise UserError(f"--seed {seed}: the small model is stored, not drawn at random; leave out --seed")
    write_once(Path(folder), model_files(size, seed), what=f"the {size} model of seed {seed}")


def model_files(size: Size, seed: int) -> dict[str, bytes]:
    """The content of every file of the folder by its relative path."""
    words = words_of(size)
    clip_vocab, clip_merges = clip_vocabulary(words)
    t5_tokenizer = t5_tokenizer_object(words)

    vae = vae_config(size)
    clip = clip_config(size, vocab_size=len(clip_vocab))
    t5 = t5_config(size, vocab_size=t5_tokenizer.get_vocab_size())
    transformer = transformer_config(size, vae, clip, t5)

    card = {"README.md": stored("README.md")} if size == "small" else {}
    return card | {
        "model_index.json": json_bytes(MODEL_INDEX),
        "tiny_model.json": json_bytes({"schema": SCHEMA, "size": size, "seed": seed}),
        "scheduler/scheduler_config.json": json_bytes(SCHEDULER),
        "tokenizer/vocab.json": json_bytes(clip_vocab),
        "tokenizer/merges.txt": "\n".join(["#version: 0.2", *map(" ".join, clip_merges), ""]).encode(),
        "tokenizer/tokenizer_config.json": json_bytes(CLIP_TOKENIZER),
        "tokenizer/special_tokens_map.json": json_bytes(special_tokens(CLIP_TOKENIZER)),
        "tokenizer_2/tokenizer.json": t5_tokenizer.to_str(pretty=True).encode(),
        "tokenizer_2/tokenizer_config.json": json_bytes(T5_TOKENIZER),
        "tokenizer_2/special_tokens_map.json": json_bytes(special_tokens(T5_TOKENIZER)),
        "text_encoder/config.json": json_bytes(clip),
        "text_encoder/model.safetensors": weights_of("text_encoder", clip, size, seed),
        "text_encoder_2/config.json": json_bytes(t5),
        "text_encoder_2/model.safetensors": weights_of("text_encoder_2", t5, size, seed),
        "transformer/config.json": json_bytes(transformer),
        "transformer/diffusion_pytorch_model.safetensors": weights_of("transformer", transformer, size, seed),
        "vae/config.json": json_bytes(vae),
        "vae/diffusion_pytorch_model.safetensors": weights_of("vae", vae, size, seed),
    }


# ---- Configs: what FLUX.1-dev's own files say, except for the sizes ----


def transformer_config(size: Size, vae: Config, clip: Config, t5: Config) -> Config:
    return {
        "_class_name": "FluxTransformer2DModel",
        "_diffusers_version": DIFFUSERS_VERSION,
        "patch_size": 1,
        "in_channels": 4 * vae["latent_channels"],  # a token is a 2x2 patch of the latent
        "out_channels": None,
        "joint_attention_dim": t5["d_model"],
        "pooled_projection_dim": clip["hidden_size"],
        "guidance_embeds": True,
        **TRANSFORMER[size],
    }


def clip_config(size: Size, vocab_size: int) -> Config:
    return {
        "architectures": ["CLIPTextModel"],
        "model_type": "clip_text_model",
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        # CLIP-L's historical value: both frameworks then pool at the highest token id, which is <|endoftext|> here too.
        "eos_token_id": 2,
        "pad_token_id": 1,
        "hidden_act": "quick_gelu",
        "initializer_factor": 1.0,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 77,
        "projection_dim": CLIP[size]["hidden_size"],
        "torch_dtype": "float32",
        "transformers_version": TRANSFORMERS_VERSION,
        "vocab_size": vocab_size,
        **CLIP[size],
    }


def t5_config(size: Size, vocab_size: int) -> Config:
    return {
        "architectures": ["T5EncoderModel"],
        "model_type": "t5",
        "classifier_dropout": 0.0,
        "decoder_start_token_id": 0,
        "dense_act_fn": "gelu_new",
        "dropout_rate": 0.1,
        "eos_token_id": 1,
        "feed_forward_proj": "gated-gelu",
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "is_gated_act": True,
        "layer_norm_epsilon": 1e-06,
        "num_decoder_layers": T5[size]["num_layers"],
        "output_past": True,
        "pad_token_id": 0,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": TRANSFORMERS_VERSION,
        "use_cache": True,
        "vocab_size": vocab_size,
        **T5[size],
    }


def vae_config(size: Size) -> Config:
    blocks = len(VAE[size]["block_out_channels"])
    return {
        "_class_name": "AutoencoderKL",
        "_diffusers_version": DIFFUSERS_VERSION,
        "act_fn": "silu",
        "down_block_types": ["DownEncoderBlock2D"] * blocks,
        "force_upcast": True,
        "in_channels": 3,
        "latent_channels": 16,
        "latents_mean": None,
        "latents_std": None,
        "mid_block_add_attention": True,
        "out_channels": 3,
        "sample_size": 1024,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "up_block_types": ["UpDecoderBlock2D"] * blocks,
        "use_post_quant_conv": False,
        "use_quant_conv": False,
        **VAE[size],
    }


# ---- Parameters: how to draw them ----


class Draw(NamedTuple):
    """A random tensor; `std` and `mean` may be arrays that broadcast to `shape`."""

    shape: tuple[int, ...]
    std: float | np.ndarray
    mean: float | np.ndarray = 0.0


# Biases and norm gains off their usual 0 and 1, so that a parameter that is swapped or not loaded changes the output.
PERTURBATION = 0.1

TABLES = ("shared", "token_embedding", "position_embedding", "relative_attention_bias")


def draw_of(part: str, name: str, shape: tuple[int, ...], config: Config) -> Draw:
    layer, _, kind = name.rpartition(".")
    if part == "vae" and layer == "encoder.conv_out":
        return latent_moments(kind, shape, config)
    if kind == "bias":
        return Draw(shape, PERTURBATION)
    if len(shape) == 1:
        return Draw(shape, PERTURBATION, mean=1.0)
    if layer.rpartition(".")[2] in TABLES:
        return Draw(shape, 1.0)
    return Draw(shape, gain(part, layer, config) / fan(shape))


def gain(part: str, layer: str, config: Config) -> float:
    if part == "text_encoder_2" and layer.endswith(".q"):
        # T5 does not divide the attention scores by sqrt(head): the query's weights carry it.
        return 1 / math.sqrt(config["d_kv"])
    return 0.7 if part == "vae" and layer == "decoder.conv_out" else 1.0  # most pixels within [-1, 1]


def fan(shape: tuple[int, ...]) -> float:
    """The root of the number of inputs to an output; a convolution's kernel is square."""
    kernel = shape[2] if len(shape) == 4 else 1
    return kernel * math.sqrt(shape[1])


def latent_moments(kind: str, shape: tuple[int, ...], config: Config) -> Draw:
    """The encoder's last layer: means of the scale that scaling_factor undoes, variances of a confident posterior."""
    is_mean = np.arange(shape[0]) < config["latent_channels"]
    if kind == "bias":
        return Draw(shape, PERTURBATION, mean=np.where(is_mean, 0.0, -5.0))
    silu_rms = 0.6  # of unit normal input, which is what the layer before sends here
    scale = np.where(is_mean, 1 / (silu_rms * config["scaling_factor"]), 1.0)
    return Draw(shape, 1.0 / fan(shape) * scale[:, None, None, None])


def weights_of(part: str, config: Config, size: Size, seed: int) -> bytes:
    """The weights of a network, as a file."""
    return stored(f"{part}.safetensors") if size == "small" else draw_all(part, config, seed)


def stored(name: str) -> bytes:
    """A file of the small model, as it is in the package."""
    file = files("flux_db.demo").joinpath("small", name)
    if not file.is_file():
        raise UserError(f"{file}: not there; scripts/small_base trains the small model and stores it")
    return file.read_bytes()


def draw_all(part: str, config: Config, seed: int) -> bytes:
    """Random weights of a network of these settings, as a file."""
    tensors = {
        name: draw_tensor(draw_of(part, name, shape, config), f"{seed}/{part}/{name}")
        for name, shape in expected_weights(part, config).items()
    }
    return safetensors_bytes(tensors, metadata={"format": "pt"})


def draw_tensor(draw: Draw, key: str) -> np.ndarray:
    """Uniform numbers from the generator's raw bits: those, unlike its distributions, numpy never changes."""
    digest = hashlib.sha256(key.encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(math.prod(draw.shape))
    unit = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0  # in [-1, 1), variance 1/3
    return (draw.mean + draw.std * math.sqrt(3.0) * unit.reshape(draw.shape)).astype(np.float32)


# ---- Tokenizers ----

CLIP_TOKENIZER: Config = {
    "tokenizer_class": "CLIPTokenizer",
    "add_prefix_space": False,
    "bos_token": "<|startoftext|>",
    "clean_up_tokenization_spaces": True,
    "do_lower_case": True,
    "eos_token": "<|endoftext|>",
    "errors": "replace",
    "model_max_length": 77,
    "pad_token": "<|endoftext|>",
    "unk_token": "<|endoftext|>",
}

# No "add_prefix_space" here: transformers then insists on a sentencepiece file. tokenizer.json itself says it.
T5_TOKENIZER: Config = {
    "tokenizer_class": "T5TokenizerFast",
    "clean_up_tokenization_spaces": True,
    "eos_token": "</s>",
    "extra_ids": 0,
    "model_max_length": 512,
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}


def special_tokens(tokenizer_config: Config) -> Config:
    return {key: value for key, value in tokenizer_config.items() if key.endswith("_token")}


def words_of(size: Size) -> list[str]:
    return [*WORDS.split(), *(MORE_WORDS.split() if size == "small" else [])]


def clip_vocabulary(words: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """CLIP's byte-level pair encoding: 256 bytes, 256 that end a word, merges, start, and end with the highest id."""
    merges: list[tuple[str, str]] = []
    for word in words:
        pieces = merged([*word[:-1], word[-1] + "</w>"], merges)
        # Appended merges rank last, so the words before keep their single token.
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            pieces = merged(pieces, merges[-1:])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(letter + "</w>" for letter in letters), *map("".join, merges)]
    tokens = [*dict.fromkeys(tokens), "<|startoftext|>", "<|endoftext|>"]
    return {token: i for i, token in enumerate(tokens)}, merges


def merged(pieces: list[str], merges: list[tuple[str, str]]) -> list[str]:
    for left, right in merges:
        result: list[str] = []
        for piece in pieces:
            if result and (result[-1], piece) == (left, right):
                result[-1] += piece
            else:
                result.append(piece)
        pieces = result
    return pieces


def t5_tokenizer_object(words: list[str]) -> Tokenizer:
    """T5's unigram model: ids 0, 1, 2 are padding, end and unknown; the rarer a piece, the lower its score."""
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    known = [(f"▁{word}", -3.0) for word in words]
    characters = [(chr(code), -10.0) for code in range(ord("!"), ord("~") + 1)]
    pieces = [*specials, ("▁", -4.0), *known, *characters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.add_special_tokens([token for token, _ in specials])
    return tokenizer


# ---- Files ----


def json_bytes(value: Config) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def write_once(folder: Path, files: dict[str, bytes], what: str) -> None:
    """Write all files into a new or empty folder, in one rename. Done already is fine; any other content is refused."""
    try:
        if folder.exists() and not is_empty_folder(folder):
            if not holds(folder, files):
                raise UserError(f"{folder}: exists and is not {what}; name another folder or remove this one")
            return
        atomic.write_folder(folder.resolve(), files)
    except OSError as error:
        raise unwritable(f"{folder}: cannot be written", error) from error


def is_empty_folder(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def holds(folder: Path, files: dict[str, bytes]) -> bool:
    return all((folder / path).is_file() and (folder / path).read_bytes() == data for path, data in files.items())
