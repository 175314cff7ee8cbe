"""The flags of `python -m flux_db generate`, read and checked before MindSpore is imported."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flux_db.check.model import check_model
from flux_db.console import program_name
from flux_db.errors import CommandParser, UserError
from flux_db.files import text_problem
from flux_db.lora import drawn_with, merge
from flux_db.lora.drawn_with import DEFAULTS, SETTINGS, Taken, number_to
from flux_db.lora.merge import Weighted
from flux_db.output_folder import GRID
from flux_db.settings.prompt_lines import PromptLine, read_prompts
from flux_db.settings.schema import Config, from_flat_dict
from flux_db.size import Size

# What somebody may want, and no typing error reaches.
MOST_PICTURES = 1000

PROMPTS_HELP = (
    "text file with a prompt on each line; a line may end in --w 768 --h 512 --seed 3 --steps 20 --guidance 4 --lora"
    " 0.8, of which the last is a factor on the weights of all LoRAs"
)


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What to draw."""

    config: Config
    """For the encoder: model, cache, device, precision, tokens."""
    precision_given: bool
    taken: tuple[Taken, ...]
    """What the LoRAs say about how they are drawn, of flags that were not given."""
    loras: tuple[Weighted, ...]
    prompts: tuple[PromptLine, ...]
    size: Size
    num: int
    """Pictures per prompt."""
    steps: int
    guidance: float
    seed: int
    output: Path

    def pictures(self) -> list[Path]:
        numbers = [(prompt, number) for prompt in range(len(self.prompts)) for number in range(self.num)]
        return [self.output / f"{prompt:03d}-{number:02d}.png" for prompt, number in numbers]


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=f"{program_name()} generate",
        description="Draw pictures with a FLUX.1 model and LoRAs. What is not given is as in the samples of the run "
        "that trained the LoRA; a line says what that is.",
    )
    add = parser.add_argument
    add(
        "--model",
        help="folder of a FLUX.1 model, or its name on the hub (default: the one that the LoRA was trained on, if the "
        "folder of its run or its metadata name it)",
    )
    add("--revision", help="branch, tag or commit of the model on the hub (default: the run's)")
    add("--variant", help="variant of the weight files, such as fp16 (default: the run's)")
    add("--cache_dir", help="folder for downloads from the hub (default: the run's, or the hub's own)")
    add("--lora", action="append", default=[], metavar="FILE[:WEIGHT]", help="LoRA file or folder; may be repeated")
    add("--prompt", action="append", default=[], help="what to draw; may be repeated")
    add("--prompts_file", type=Path, help=PROMPTS_HELP)
    add("--num", type=number_to(MOST_PICTURES), default=1, help="pictures per prompt (default: 1)")
    value = {flag: read for flag, (_, read) in SETTINGS.items()}
    add(
        "--size",
        type=value["size"],
        metavar="HxW",
        help="height x width, as in diffusers (default: the run's, or 1024x1024)",
    )
    add(
        "--steps",
        type=value["steps"],
        metavar="N",
        help=f"denoising steps (default: the run's, or {DEFAULTS['steps']})",
    )
    add(
        "--guidance",
        type=value["guidance"],
        metavar="X",
        help=f"guidance value (default: the run's, or {DEFAULTS['guidance']})",
    )
    add("--seed", type=int, metavar="N", help=f"start of the random draws (default: the run's, or {DEFAULTS['seed']})")
    add(
        "--max_sequence_length",
        type=value["max_sequence_length"],
        metavar="N",
        help=f"tokens that T5 sees (default: the run's, or {DEFAULTS['max_sequence_length']})",
    )
    add("--device", choices=["auto", "Ascend", "CPU"], default="auto", help="default: auto")
    add(
        "--mixed_precision",
        choices=["no", "fp16", "bf16"],
        help="default: the run's, if the device has it, or bf16 on Ascend and no on the CPU",
    )
    add(
        "--base_precision",
        choices=["full", "int8"],
        help="int8: store the transformer's matrices as int8 and compute the LoRAs beside them (default: the run's, or "
        "full)",
    )
    add(
        "--vae_tiling",
        choices=["auto", "on", "off"],
        default="auto",
        help="decode in overlapping tiles, for less memory; auto: above 1024 x 1024 pixels (default: auto)",
    )
    add("--encode_cache_dir", help="folder for encoded prompts (default: cache in the output folder)")
    add("-o", "--output", required=True, type=Path, metavar="DIR", help="folder for the pictures")
    return parser


def read(argv: Sequence[str]) -> GenerateRequest:
    """All problems at once, as a UserError."""
    given = build_parser().parse_args(list(argv))
    problems: list[str] = []
    prompts = [*(PromptLine(text=text) for text in given.prompt), *_prompts_of(given.prompts_file, problems)]
    if not prompts and not problems:
        problems.append("give a --prompt, or a --prompts_file with a prompt on each line")
    if any(not prompt.strip() for prompt in given.prompt):
        problems.append("--prompt is empty: give it a value or leave it out")
    problems += [f"--prompt {prompt}: {problem}" for prompt in given.prompt if (problem := text_problem(prompt))]
    if not given.lora and any(prompt.lora is not None for prompt in prompts):
        problems.append(
            f"--prompts_file {given.prompts_file}: a line has --lora, a factor on LoRAs; give a --lora FILE"
        )
    if given.seed is not None and not 0 <= given.seed <= drawn_with.LARGEST_SEED:
        problems.append(f"--seed {given.seed}: must be from 0 to {drawn_with.LARGEST_SEED}")
    loras = tuple(_weighted(text, problems) for text in given.lora)
    taken = drawn_with.take(vars(given), [lora.path for lora in loras])
    values = {flag: vars(given)[flag] for flag in SETTINGS if vars(given)[flag] is not None}
    values = DEFAULTS | {one.flag: one.value for one in taken} | values
    request = GenerateRequest(
        config=_config(given, values, prompts),
        precision_given=given.mixed_precision is not None,
        taken=tuple(taken),
        loras=loras,
        prompts=tuple(prompts),
        size=values["size"],
        num=given.num,
        steps=values["steps"],
        guidance=values["guidance"],
        seed=values["seed"],
        output=given.output,
    )
    problems += _output_problems(request)
    problems += _model_problems(values.get("model"), request)
    if problems:
        raise UserError(problems)
    return request


def _config(given: argparse.Namespace, values: Mapping[str, Any], prompts: Sequence[PromptLine]) -> Config:
    known = {SETTINGS[flag][0]: value for flag, value in values.items() if flag != "size"}
    return from_flat_dict(
        {
            "pretrained_model_name_or_path": "",
            **known,
            "vae_tiling": given.vae_tiling,
            "instance_data_dir": "",
            "instance_prompt": prompts[0].text if prompts else "",
            "output_dir": str(given.output),
            "encode_cache_dir": given.encode_cache_dir,
            "device": given.device,
        }
    )


def _prompts_of(path: Path | None, problems: list[str]) -> list[PromptLine]:
    if path is None:
        return []
    try:
        return read_prompts(path, "prompts_file")
    except UserError as error:
        problems += error.problems
        return []


def _weighted(text: str, problems: list[str]) -> Weighted:
    try:
        return merge.weighted(text)
    except ValueError as problem:
        problems.append(f"--lora {problem}")
        return Weighted(Path(text))


def _output_problems(request: GenerateRequest) -> list[str]:
    for path in (request.output, *request.output.absolute().parents):
        if os.path.lexists(path) and not os.path.isdir(path):
            return [f"-o {request.output}: {path} is not a folder; give one"]
    there = [path.name for path in (*request.pictures(), request.output / GRID) if os.path.lexists(path)]
    return [f"-o {request.output}: has {there[0]} already; choose another folder"] if there else []


def _model_problems(name: str | None, request: GenerateRequest) -> list[str]:
    if name is None:
        why = ": the LoRA does not say where the model is that it was trained on" if request.loras else " to draw with"
        return [f"give a --model{why}"]
    if os.path.isdir(name):
        problems = check_model(Path(name), request.config)
        return with_own_flags(problems)
    if name.startswith((".", "~", os.sep)) or name.count("/") != 1:
        source = next((f", named by {one.source}" for one in request.taken if one.flag == "model"), "")
        return [f"--model {name}{source}: no such folder, and no name on the hub of the form owner/model"]
    return []


def with_own_flags(problems: Iterable[str]) -> list[str]:
    """Problems of the model, which the trainer has under another flag."""
    return [problem.replace("--pretrained_model_name_or_path", "--model") for problem in problems]
