"""Problems in the files and packages that the settings name, found before any model is loaded."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from flux_db.check.model import check_model
from flux_db.errors import UserError
from flux_db.model import scoring_folder
from flux_db.problem import Problem
from flux_db.settings.concepts import CLASS_PROMPT, has_trigger
from flux_db.settings.derived import raw_sample_prompts, triggers, validation_prompts
from flux_db.settings.schema import TRACKERS, Config
from flux_db.settings.subject_word import names_subject, word_of


def check_files(config: Config) -> list[Problem]:
    """Problems in the files and packages that the settings name; writes nothing and loads no weights or pictures."""
    data, output = config.data, config.output
    problems = _model_problems(config)
    for name in ("instance_data_dir", "mask_dir"):
        if getattr(data, name) is not None:
            problems += _reading_problems(name, getattr(data, name))
    for concept in data.concepts:
        for key in ("dir", "mask_dir"):
            if (folder := getattr(concept, key)) is not None:
                problems += _reading_problems("concepts", folder, key)
    if data.dataset_name is not None:
        problems += _dataset_problems(data.dataset_name)
    if data.class_data_dir is not None and not os.path.isdir(data.class_data_dir):
        problems += _creation_problems("class_data_dir", data.class_data_dir)
    problems += _creation_problems("output_dir", output.output_dir)
    if data.encode_cache_dir is not None:
        problems += _creation_problems("encode_cache_dir", data.encode_cache_dir)
    if config.validation.validation_data_dir is not None:
        problems += _reading_problems("validation_data_dir", config.validation.validation_data_dir)
    problems += _prompts_file_problems(config) + _score_problems(config)
    return problems + _missing_trackers(config) + _resume_problems(config)


def _prompts_file_problems(config: Config) -> list[Problem]:
    try:
        prompts = [line.text for line in raw_sample_prompts(config)]
    except UserError as error:
        return [Problem(text, flag="validation_prompts_file") for text in error.problems]
    file = config.validation.validation_prompts_file
    if file is None:
        return []
    of_file = prompts[len(config.validation.validation_prompt) :]
    if config.data.class_prompt is None and any(CLASS_PROMPT in prompt for prompt in of_file):
        text = f"--validation_prompts_file {file}: needs --class_prompt, which takes the place of {CLASS_PROMPT}"
        return [Problem(text, flag="validation_prompts_file", also=("class_prompt",))]
    if not triggers(config) and any(map(has_trigger, of_file)):
        word = "a trigger in --concepts" if config.data.concepts else "--trigger_word"
        text = f"--validation_prompts_file {file}: needs {word}, which takes the place of {{trigger}}"
        return [Problem(text, flag="validation_prompts_file", also=("trigger_word", "concepts"))]
    text = f"--validation_prompts_file {file}: has no prompt in it"
    return [] if prompts else [Problem(text, flag="validation_prompts_file")]


def _score_problems(config: Config) -> list[Problem]:
    """Of the networks that score samples; one on the hub has problems only after the download."""
    validation = config.validation
    if validation.score_steps is None:
        return []
    problems, word = [], word_of(config)
    networks = {"score_dino": ("dinov2", validation.score_dino), "score_clip": ("clip", validation.score_clip)}
    for flag, (network, name) in networks.items():
        if name is not None:
            texts = list(filter(None, [scoring_folder.name_problem(name)]))
            if os.path.isdir(name):
                texts = scoring_folder.problems(Path(name), network)
            problems += [Problem(f"--{flag} {name}: {text}", flag=flag) for text in texts]
    if word is not None and (validation.score_dino or validation.score_clip):
        problems += _subject_problems(config, word)
    return problems


def _subject_problems(config: Config, word: str) -> list[Problem]:
    try:
        prompts = validation_prompts(config)
    except UserError:
        return []  # reported with the prompts
    if not prompts or any(names_subject(prompt, word) for prompt in prompts):
        return []
    text = f"--validation_prompt: none names the subject, {word}, so no sample can be scored; add such a prompt"
    return [Problem(text, flag="validation_prompt", also=("validation_prompts_file", "score_steps", "trigger_word"))]


def _missing_trackers(config: Config) -> list[Problem]:
    return [
        Problem(
            f"--report_to {name}: not installed here; pip install {TRACKERS[name]}, or leave it out", flag="report_to"
        )
        for name in config.output.trackers
        if name in TRACKERS and importlib.util.find_spec(TRACKERS[name]) is None
    ]


def _model_problems(config: Config) -> list[Problem]:
    name = config.model.pretrained_model_name_or_path
    if os.path.exists(name) or _looks_local(name):
        problems = _reading_problems("pretrained_model_name_or_path", name)
        return problems or check_model(Path(name), config)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return []
    return _problem(
        "pretrained_model_name_or_path", name, "neither a folder nor a name on the hub of the form owner/model"
    )


def _dataset_problems(name: str) -> list[Problem]:
    """A dataset on the hub may have no owner in its name: mnist."""
    if os.path.exists(name) or _looks_local(name):
        return _reading_problems("dataset_name", name)
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return []
    return _problem("dataset_name", name, "neither a folder nor a name on the hub of the form owner/dataset")


def _looks_local(name: str) -> bool:
    return name.startswith((".", os.sep, "~")) or (os.sep in name and os.path.isdir(os.path.dirname(name)))


def _reading_problems(flag: str, path: str, key: str = "") -> list[Problem]:
    """`key`: of an entry of --concepts."""
    if not os.path.exists(path):
        return _problem(flag, path, "no such folder; check the path", key)
    if not os.path.isdir(path):
        return _problem(flag, path, "is a file; give the folder", key)
    if not os.access(path, os.R_OK | os.X_OK):
        return _problem(flag, path, "no permission to read this folder", key)
    return []


def _creation_problems(flag: str, path: str) -> list[Problem]:
    """Whether files can be written to a folder that may not exist yet, found out without making it."""
    existing = Path(path).absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not os.path.isdir(existing):
        return _problem(flag, path, f"{existing} is a file; choose another folder")
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        return _problem(flag, path, f"{existing} is on a read-only file system; choose another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        return _problem(flag, path, f"no permission to write in {existing}; choose another folder")
    return []


def _resume_problems(config: Config) -> list[Problem]:
    path = config.output.resume_from_checkpoint
    if path is None or path == "latest" or os.path.isdir(path):
        return []
    inside = os.path.join(config.output.output_dir, path)
    hint = f"did you mean {inside}?" if os.path.isdir(inside) else "give the path of a checkpoint folder, or latest"
    return _problem("resume_from_checkpoint", path, f"no such folder; {hint}")


def _problem(flag: str, value: str, text: str, key: str = "") -> list[Problem]:
    return [Problem(f"--{flag}{f': {key}' if key else ''} {value}: {text}", flag=flag)]
