"""A finished run on the Hugging Face hub: checked at the start, uploaded at the end. Nothing here runs unasked."""

from __future__ import annotations

import glob
import os
import shlex
from pathlib import Path
from typing import Any

from flux_db.console import say, stage
from flux_db.errors import UserError
from flux_db.output_folder import EMA_LORA, GRID, LORA_FILE, MODEL_CARD, SAMPLES
from flux_db.problem import Problem
from flux_db.run import sample_files
from flux_db.run.lock import is_first_process
from flux_db.settings.schema import Config
from flux_db.settings.secrets import LOGIN


class PushFailed(Exception):
    """Nothing is lost: everything is still in the output folder."""


def repository(config: Config) -> str:
    """Where to upload to: without an owner the hub takes the token's."""
    return config.hub.hub_model_id or Path(config.output.output_dir).absolute().name


def check_hub(config: Config) -> list[Problem]:
    """Problems that would stop the upload after hours of training. With --push_to_hub it asks the hub itself."""
    if not config.hub.push_to_hub:
        return []
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    name = repository(config)
    given = config.hub.hub_model_id is not None
    head = f"--hub_model_id {name}" if given else f"--push_to_hub: the name of --output_dir, {name}"
    try:
        validate_repo_id(name)
    except HFValidationError:
        text = f"{head}: is not a name for the hub; give --hub_model_id owner/name of letters, digits, - _ and ."
        return [Problem(text, flag="hub_model_id" if given else "output_dir")]
    if constants.HF_HUB_OFFLINE:
        return [Problem("--push_to_hub: HF_HUB_OFFLINE is set; unset it, or leave the flag out", flag="push_to_hub")]
    if not get_token():
        return [Problem(f"--push_to_hub: there is no token; {LOGIN}", flag="push_to_hub")]
    if not is_first_process():
        return []
    problem, certain = _no_access(_api(), name, config.hub.hub_private)
    if problem and not certain:
        say(f"warning: --push_to_hub: {problem}; training starts, and the upload is tried at its end")
    return [Problem(f"--push_to_hub: {problem}", flag="push_to_hub")] if problem and certain else []


def push(output: Path, name: str, *, private: bool) -> str:
    """Upload LoRA, card and samples; returns the address. A PushFailed has the reason in one line."""
    api = _api()
    problem, certain = _no_access(api, name, private)
    if problem and certain:
        raise PushFailed(problem)
    try:
        with stage(f"Uploading to {api.endpoint}"):
            url = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=url.repo_id,
                folder_path=output,
                allow_patterns=[glob.escape(name) for name in files_to_push(output)],
                commit_message="LoRA trained with flux-db",
            )
    except Exception as problem:  # whatever it is: the run is good and must end well
        raise PushFailed(_reason(problem)) from problem
    return str(url)


def push_run(config: Config) -> int:
    """Upload after training; returns the exit code. A failure keeps everything and prints the command to retry."""
    output, name = Path(config.output.output_dir), repository(config)
    try:
        print(f"hub:     {push(output, name, private=config.hub.hub_private)}")
        return 0
    except PushFailed as problem:
        print_retry(config, str(problem))
        return 1


def print_retry(config: Config, problem: str) -> None:
    output = Path(config.output.output_dir)
    say(f"error: the upload failed: {problem}. The run itself is complete, in {output}. To try again:")
    say("  " + retry_command(output, repository(config), config.hub.hub_private), wrap=False)


def retry_command(output: Path, name: str, private: bool) -> str:
    words = ["python", "-m", "flux_db", "push", str(output), "--hub_model_id", name]
    return shlex.join(words if private else [*words, "--no-hub_private"])


def files_to_push(output: Path) -> list[str]:
    """LoRA, its average, card, and the samples that it shows; never cache, checkpoints, logs or settings with paths.

    A link that leads out of the folder is left out as well: what lies there is not of this run.
    """
    rounds = sample_files.read_rounds(output)
    samples = [picture.path.relative_to(output).as_posix() for picture in rounds[-1].pictures] if rounds else []
    names = [LORA_FILE, EMA_LORA, MODEL_CARD, f"{SAMPLES}/{GRID}", *samples]
    home = output.resolve()
    return [name for name in names if os.path.isfile(output / name) and (output / name).resolve().is_relative_to(home)]


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="flux-db")


def _no_access(api: Any, name: str, private: bool) -> tuple[str | None, bool]:
    """(why the upload would fail, whether that is certain)"""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        owner = api.whoami()["name"]
        try:
            found = api.model_info(name if "/" in name else f"{owner}/{name}")
        except RepositoryNotFoundError:
            return None, True
        if private and not found.private:
            return f"{name} exists on the hub and is public; add --no-hub_private, or take another name", True
        return None, True
    # an answer of another shape raises the others
    except (OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as problem:
        if getattr(getattr(problem, "response", None), "status_code", None) in (401, 403):
            return f"the hub at {api.endpoint} does not accept the token; {LOGIN}", True
        return f"the hub at {api.endpoint} cannot be asked now ({_reason(problem)})", False


def _reason(problem: Exception) -> str:
    """One line, without the token."""
    from huggingface_hub import get_token

    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    text = f"{type(problem).__name__}: {' '.join(lines)[:300]}"
    token = get_token()
    return text.replace(token, "***") if token else text


def find_run(output: Path) -> Path:
    """The folder of a finished run."""
    if not os.path.isdir(output):
        raise UserError(f"{output}: no such folder; give the --output_dir of a finished run")
    if LORA_FILE not in files_to_push(output):
        raise UserError(f"{output}: has no {LORA_FILE}; give the --output_dir of a finished run")
    return output
