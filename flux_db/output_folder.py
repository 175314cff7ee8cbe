"""The name of every file and folder that a run writes into its output folder."""

import re

CONFIG = "config.yaml"
STATUS = "train_state.json"
METRICS = "metrics.jsonl"
LOCK = ".lock"
CACHE = "cache"
# in the cache: what was found out about pictures and about its own files
PICTURES_SEEN = "pictures_seen.json"
FILES_SEEN = "files_seen.json"

LORA_FILE = "pytorch_lora_weights.safetensors"
BEST_LORA = "best_lora.safetensors"
# the running average of the weights, with --ema_decay; also in checkpoints
EMA_LORA = "ema_lora.safetensors"
MODEL_CARD = "README.md"

# class pictures, without --class_data_dir
CLASS_PICTURES = "class"

# samples/step-00250/00.png, samples/grid.png
SAMPLES = "samples"
GRID = "grid.png"

# by `score`
SCORES = "scores.json"

REPORT = "report.html"
# small copies of the training pictures, for the report
THUMBNAILS = "report"
THUMBNAIL_INDEX = "training_pictures.json"

# by --dry_run and `check`
CONTACT_SHEET = "contact_sheet.png"
PICTURE_TABLE = "pictures.csv"


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def checkpoint_step(name: str) -> int | None:
    """The step in a checkpoint's name; None for any other name."""
    match = re.fullmatch("checkpoint-(0|[1-9][0-9]*)", name)
    return int(match[1]) if match else None


def earlier_name(number: int) -> str:
    """Of the folder that holds what an earlier run left."""
    return f"earlier-{number}"
