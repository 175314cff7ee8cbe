"""Find every problem with the settings and the files they name before any model is loaded.

A check returns its problems as messages; each names the flag, the value and what to do.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flux_db import buckets
from flux_db.buckets import PIXELS_PER_TOKEN
from flux_db.config import Config, LoraConfig, background, has_trigger, to_flat_dict
from flux_db.errors import did_you_mean

# Beyond this scale the mode scheme's map from uniform draws to timesteps is no longer one to one (SD3 paper, sec. 3.1).
LARGEST_MODE_SCALE = 2 / (math.pi - 2)

# How the stand-in for a large file begins in a git clone made without LFS.
LFS_POINTER = b"version https://git-lfs"

# No header of weights is near this size; a file that claims more is not read.
HEADER_LIMIT = 100 * 2**20

# What a number must be, the test for it, and the flags it is asked of. Unset flags are left out.
BOUNDS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "at least 1",
        lambda x: x >= 1,
        "rank repeats num_class_images sample_batch_size train_batch_size gradient_accumulation_steps num_train_epochs "
        "max_train_steps lr_num_cycles num_validation_images validation_epochs validation_steps "
        "validation_inference_steps checkpointing_steps checkpoints_total_limit max_skipped_steps max_buckets "
        "cache_crops",
    ),
    (
        "0 or more",
        lambda x: x >= 0,
        "prior_loss_weight dataloader_num_workers guidance_scale validation_guidance lr_warmup_steps adam_weight_decay",
    ),
    ("above 0", lambda x: x > 0, "lora_alpha logit_std learning_rate lr_power adam_epsilon max_grad_norm"),
    ("0 or more and below 1", lambda x: 0 <= x < 1, "lora_dropout adam_beta1 adam_beta2"),
    ("from 0 to 1", lambda x: 0 <= x <= 1, "caption_dropout unmasked_weight"),
    ("from 1 to 512", lambda x: 1 <= x <= 512, "max_sequence_length"),
    ("from 0 to 4294967295", lambda x: 0 <= x < 2**32, "seed"),
    (f"from -1 to {LARGEST_MODE_SCALE:.2f}", lambda x: -1 <= x <= LARGEST_MODE_SCALE, "mode_scale"),
    (f"a multiple of {PIXELS_PER_TOKEN}", lambda x: x > 0 and x % PIXELS_PER_TOKEN == 0, "resolution"),
)


def check(config: Config) -> list[str]:
    """Problems in the values alone; touches no file."""
    values = to_flat_dict(config)
    return [
        *_out_of_bounds(values),
        *_empty_texts(values),
        *_contradictions(config),
        *_crop_problems(config),
        *_unknown_changes(config),
    ]


def check_files(config: Config) -> list[str]:
    """Problems in the folders that the settings name; writes nothing and loads no weights. Pictures are not opened."""
    data, output = config.data, config.output
    problems = _model_problems(config)
    for name in ("instance_data_dir", "mask_dir"):
        if getattr(data, name) is not None:
            problems += _reading_problems(name, getattr(data, name))
    if data.dataset_name is not None:
        problems += _dataset_problems(data.dataset_name)
    if data.class_data_dir is not None and not os.path.isdir(data.class_data_dir):
        problems += _creation_problems("class_data_dir", data.class_data_dir)
    problems += _creation_problems("output_dir", output.output_dir)
    if data.encode_cache_dir is not None:
        problems += _creation_problems("encode_cache_dir", data.encode_cache_dir)
    return problems + _resume_problems(config)


def _out_of_bounds(values: dict[str, Any]) -> list[str]:
    return [
        f"--{name} {values[name]}: must be {rule}"
        for rule, holds, names in BOUNDS
        for name in names.split()
        if values[name] is not None and not holds(values[name])
    ]


def _empty_texts(values: dict[str, Any]) -> list[str]:
    return [
        f"--{name} is empty: give it a value or leave it out"
        for name, value in values.items()
        for text in (value if isinstance(value, list) else [value])
        if isinstance(text, str) and not text.strip()
    ]


def _contradictions(config: Config) -> list[str]:
    data, optim, runtime = config.data, config.optim, config.runtime
    problems = []
    for name in ("class_data_dir", "class_prompt"):
        value = getattr(data, name)
        if data.with_prior_preservation and value is None:
            problems.append(f"--with_prior_preservation needs --{name}: add it")
        if not data.with_prior_preservation and value is not None:
            problems.append(f"--{name} {value}: needs --with_prior_preservation; add that or leave --{name} out")
    problems += _picture_contradictions(config)
    if (
        data.class_data_dir
        and data.instance_data_dir
        and Path(data.class_data_dir).absolute() == Path(data.instance_data_dir).absolute()
    ):
        problems.append(f"--class_data_dir {data.class_data_dir}: must be another folder than --instance_data_dir")
    if optim.lr_warmup_steps > 0 and optim.lr_scheduler == "constant":
        problems.append(
            f"--lr_warmup_steps {optim.lr_warmup_steps}: --lr_scheduler constant has no warm-up;"
            " use constant_with_warmup"
        )
    if optim.max_train_steps is not None and optim.lr_warmup_steps > optim.max_train_steps:
        problems.append(
            f"--lr_warmup_steps {optim.lr_warmup_steps}: longer than the run of --max_train_steps"
            f" {optim.max_train_steps}; shorten the warm-up"
        )
    if config.hub.hub_model_id and not config.hub.push_to_hub:
        problems.append(f"--hub_model_id {config.hub.hub_model_id}: needs --push_to_hub; add that or leave it out")
    if runtime.device == "CPU" and runtime.mixed_precision == "bf16":
        problems.append("--mixed_precision bf16: the CPU backend has no bf16 kernels; use no or fp16 with --device CPU")
    if runtime.device == "CPU" and data.enable_mindspore_data_sink:
        problems.append("--enable_mindspore_data_sink: works on Ascend only; leave it out with --device CPU")
    return problems


def _crop_problems(config: Config) -> list[str]:
    data, found = config.data, []
    folders = [Path(folder).absolute() for folder in (data.mask_dir, data.instance_data_dir) if folder]
    if len(folders) == 2 and folders[0].is_relative_to(folders[1]):
        found.append(
            f"--mask_dir {data.mask_dir}: lies in --instance_data_dir, where every picture is trained on; move it out"
        )
    if data.aspect_ratio_buckets is not None:
        told = buckets.problems(data.aspect_ratio_buckets, data.resolution, data.max_buckets)
        found += [f"--aspect_ratio_buckets: {problem}" for problem in told]
        if data.enable_mindspore_data_sink:
            found.append(
                "--enable_mindspore_data_sink: takes batches of one size only; leave it or --aspect_ratio_buckets out"
            )
    if data.cache_crops > 1 and data.center_crop:
        found.append(f"--cache_crops {data.cache_crops}: --center_crop has only one; leave one of them out")
    if data.cache_crops > 1 and not data.cache_latents:
        found.append(
            f"--cache_crops {data.cache_crops}: --no-cache_latents crops anew for every sample; leave one of them out"
        )
    return found


def _picture_contradictions(config: Config) -> list[str]:
    data, problems = config.data, []
    if data.instance_data_dir is None and data.dataset_name is None:
        problems.append("--instance_data_dir or --dataset_name is required: say where the pictures of the subject are")
    if data.instance_data_dir is not None and data.dataset_name is not None:
        problems.append(f"--dataset_name {data.dataset_name}: not together with --instance_data_dir; leave one out")
    defaults = {f.name: f.default for f in dataclasses.fields(data)}
    for name in ("dataset_config_name", "image_column", "caption_column"):
        value = getattr(data, name)
        if data.dataset_name is None and value != defaults[name]:
            problems.append(f"--{name} {value}: needs --dataset_name; add that or leave --{name} out")
    if data.trigger_word is None:
        prompts = {"instance_prompt": [data.instance_prompt], "validation_prompt": config.validation.validation_prompt}
        problems += [
            f"--{name} {text}: needs --trigger_word, which takes the place of {{trigger}}"
            for name, texts in prompts.items()
            for text in texts
            if has_trigger(text)
        ]
    elif has_trigger(data.trigger_word):
        problems.append(f"--trigger_word {data.trigger_word}: must be a word of its own")
    if data.class_prompt is not None and has_trigger(data.class_prompt):
        problems.append(f"--class_prompt {data.class_prompt}: names the class, so without {{trigger}}")
    try:
        background(config)
    except ValueError:
        problems.append(f"--alpha_background {data.alpha_background}: no colour; give a name such as grey, or #rrggbb")
    return problems


def _unknown_changes(config: Config) -> list[str]:
    known = to_flat_dict(config)
    return [
        f"--allow_changed {name}: no such setting{did_you_mean(name, known)}"
        for name in sorted(config.output.changes_allowed)
        if name not in known
    ]


def _model_problems(config: Config) -> list[str]:
    name = config.model.pretrained_model_name_or_path
    if os.path.exists(name) or _looks_local(name):
        problems = _reading_problems("pretrained_model_name_or_path", name)
        return problems or check_model(Path(name), config)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return []
    return [f"--pretrained_model_name_or_path {name}: neither a folder nor a name on the hub of the form owner/model"]


def _dataset_problems(name: str) -> list[str]:
    """A dataset on the hub may have no owner in its name: mnist."""
    if os.path.exists(name) or _looks_local(name):
        return _reading_problems("dataset_name", name)
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return []
    return [f"--dataset_name {name}: neither a folder nor a name on the hub of the form owner/dataset"]


def check_model(folder: Path, config: Config) -> list[str]:
    """Problems of a model folder for this run; a name on the hub has one only after the download."""
    problems = [
        f"--pretrained_model_name_or_path {folder}: {problem}"
        for problem in (
            *_missing_parts(folder, config.model.variant),
            *_wrong_sides(folder, config),
        )
    ]
    return problems or _unmatched_layers(folder / "transformer", config.lora)


def _unmatched_layers(part: Path, config: LoraConfig) -> list[str]:
    """Layers asked for that the transformer does not have; read from the headers of its weight files."""
    if config.lora_layers is None:
        return []
    modules = {
        name.removesuffix(".weight")
        for file in part.glob("*.safetensors")
        for name, entry in _safetensors_header(file).items()
        if name.endswith(".weight") and len(entry.get("shape", ())) == 2
    }
    if not modules:
        return []  # not for this check to tell: a damaged file shows when it is loaded
    endings = {".".join(name.split(".")[i:]) for name in modules for i in range(name.count(".") + 1)}
    return [
        f"--lora_layers {layer}: no linear layer of the transformer has this name{did_you_mean(layer, endings)}"
        for layer in config.layers
        if layer not in endings
    ]


def _safetensors_header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            return json.loads(stream.read(min(length, HEADER_LIMIT)))
    except (OSError, ValueError):
        return {}


def _looks_local(name: str) -> bool:
    return name.startswith((".", os.sep, "~")) or (os.sep in name and os.path.isdir(os.path.dirname(name)))


def _missing_parts(folder: Path, variant: str | None) -> list[str]:
    problems: list[str] = []
    index = _read_json(folder / "model_index.json", problems)
    if index is None:
        return [f"{problems[0]}; a FLUX.1 folder in diffusers layout has it"]
    if index.get("_class_name") != "FluxPipeline":
        return [f"model_index.json names a {index.get('_class_name')}, not a FluxPipeline; use a FLUX.1 model"]
    for part, check_part in MODEL_PARTS.items():
        if os.path.isdir(folder / part):
            problems += check_part(folder / part, variant)
        else:
            problems.append(f"{part} is missing")
    return [f"{problem}; the download may be incomplete" for problem in problems]


def _scheduler_problems(part: Path, _variant: str | None) -> list[str]:
    problems: list[str] = []
    _read_json(part / "scheduler_config.json", problems)
    return problems


def _network_problems(part: Path, variant: str | None) -> list[str]:
    problems: list[str] = []
    _read_json(part / "config.json", problems)
    return problems + _weight_problems(part, variant)


def _tokenizer_problems(part: Path, _variant: str | None) -> list[str]:
    if any(os.path.isfile(part / name) for name in ("tokenizer.json", "vocab.json", "spiece.model")):
        return []
    return [f"{part.name} has no vocabulary"]


MODEL_PARTS: dict[str, Callable[[Path, str | None], list[str]]] = {
    "scheduler": _scheduler_problems,
    "vae": _network_problems,
    "transformer": _network_problems,
    "text_encoder": _network_problems,
    "text_encoder_2": _network_problems,
    "tokenizer": _tokenizer_problems,
    "tokenizer_2": _tokenizer_problems,
}


def _weight_problems(part: Path, variant: str | None) -> list[str]:
    """Weights are one safetensors file, or an index that names several; a variant's files go before the plain ones."""
    stem = "model" if part.name.startswith("text_encoder") else "diffusion_pytorch_model"
    for single, index in (
        (f"{stem}.{variant}.safetensors", f"{stem}.safetensors.index.{variant}.json"),
        (f"{stem}.safetensors", f"{stem}.safetensors.index.json"),
    ):
        if os.path.isfile(part / single):
            return _damaged([part / single])
        if os.path.isfile(part / index):
            return _shard_problems(part / index)
    return [f"{part.name} has no weights ({stem}.safetensors or {stem}.safetensors.index.json)"]


def _shard_problems(index: Path) -> list[str]:
    problems: list[str] = []
    content = _read_json(index, problems)
    if content is None:
        return problems
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        return [f"{index.parent.name}/{index.name} names no weight files"]
    return _damaged(sorted({index.parent / str(shard) for shard in weight_map.values()}))


def _damaged(files: list[Path]) -> list[str]:
    problems = []
    for file in files:
        name = f"{file.parent.name}/{file.name}"
        try:
            with file.open("rb") as stream:
                start = stream.read(len(LFS_POINTER))
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
        else:
            if not start:
                problems.append(f"{name} is empty")
            elif start == LFS_POINTER:
                problems.append(f"{name} is only a pointer of Git LFS, which git lfs pull would fetch")
    return problems


def _wrong_sides(folder: Path, config: Config) -> list[str]:
    channels = (_read_json(folder / "vae" / "config.json", []) or {}).get("block_out_channels")
    # Every VAE block but the last halves the picture, and a token is 2 x 2 latents.
    multiple = 2 ** len(channels) if isinstance(channels, list) else PIXELS_PER_TOKEN
    if PIXELS_PER_TOKEN % multiple == 0:
        return []
    data, found = config.data, []
    if data.resolution % multiple:
        found.append(f"its VAE needs a multiple of {multiple}, not --resolution {data.resolution}")
    if any(side % multiple for size in _possible_sizes(config) for side in size):
        found.append(f"its VAE needs multiples of {multiple}; name such sizes with --aspect_ratio_buckets")
    return found


def _possible_sizes(config: Config) -> list[buckets.Size]:
    data, text = config.data, config.data.aspect_ratio_buckets
    if text is None or buckets.problems(text, data.resolution, data.max_buckets):
        return []
    return buckets.candidates(data.resolution) if text.strip() == buckets.AUTO else buckets.parse(text)


def _read_json(file: Path, problems: list[str]) -> dict[str, Any] | None:
    """The content of a JSON file, or None with a note in problems."""
    name = file.name if file.name == "model_index.json" else f"{file.parent.name}/{file.name}"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{name} is missing")
    except (OSError, ValueError) as error:
        problems.append(f"{name} cannot be read ({error})")
    else:
        if isinstance(content, dict):
            return content
        problems.append(f"{name} holds no JSON object")
    return None


def _reading_problems(flag: str, path: str) -> list[str]:
    if not os.path.exists(path):
        return [f"--{flag} {path}: no such folder; check the path"]
    if not os.path.isdir(path):
        return [f"--{flag} {path}: is a file; give the folder"]
    if not os.access(path, os.R_OK | os.X_OK):
        return [f"--{flag} {path}: no permission to read this folder"]
    return []


def _creation_problems(flag: str, path: str) -> list[str]:
    """Whether files can be written to a folder that may not exist yet, found out without making it."""
    existing = Path(path).absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not os.path.isdir(existing):
        return [f"--{flag} {path}: {existing} is a file; choose another folder"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"--{flag} {path}: no permission to write in {existing}; choose another folder"]
    return []


def _resume_problems(config: Config) -> list[str]:
    path = config.output.resume_from_checkpoint
    if path is None or path == "latest" or os.path.isdir(path):
        return []
    inside = os.path.join(config.output.output_dir, path)
    hint = f"did you mean {inside}?" if os.path.isdir(inside) else "give the path of a checkpoint folder, or latest"
    return [f"--resume_from_checkpoint {path}: no such folder; {hint}"]
