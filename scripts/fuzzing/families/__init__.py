"""Every family of cases, by name."""

from collections.abc import Callable, Iterator

from fuzzing.case import Plan
from fuzzing.families import (
    captions,
    checkpoints,
    configs,
    drawing,
    environment,
    flags,
    folders,
    fusing,
    hub,
    lora_settings,
    loras,
    models,
    pictures,
    prompts,
    runs,
    weights,
    yaml_files,
)

FAMILIES: dict[str, Callable[[], Iterator[Plan]]] = {
    "flags": flags.plans,
    "yaml": yaml_files.plans,
    "pictures": pictures.plans,
    "captions": captions.plans,
    "masks": captions.mask_plans,
    "folders": folders.plans,
    "models": models.plans,
    "configs": configs.plans,
    "weights": weights.plans,
    "loras": loras.plans,
    "lora_settings": lora_settings.plans,
    "fuse": fusing.plans,
    "runs": runs.plans,
    "prompts": prompts.plans,
    "hub": hub.plans,
    "datasets": hub.dataset_plans,
    "environment": environment.plans,
    "checkpoints": checkpoints.plans,
    "generate": drawing.plans,
}

# These need MindSpore: seconds for each case.
SLOW: tuple[str, ...] = ("checkpoints", "generate")
