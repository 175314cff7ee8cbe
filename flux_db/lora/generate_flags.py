"""The flags of `python -m flux_db generate`, read and checked before MindSpore is imported."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flux_db.check.model import check_model
from flux_db.console import program_name
from flux_db.errors import UserError
from flux_db.files import text_problem
from flux_db.lora import merge
from flux_db.lora.merge import Weighted
from flux_db.output_folder import GRID
from flux_db.settings.prompt_lines import PromptLine, read_prompts
from flux_db.settings.schema import Config, from_flat_dict
from flux_db.size import PIXELS_PER_TOKEN, Size, parse_size

# What somebody may want, and no typing error reaches.
MOST_PICTURES, MOST_STEPS, MOST_PIXELS = 1000, 1000, 8192


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
    parser = argparse.ArgumentParser(
        prog=f"{program_name()} generate",
        description="Draw pictures with a FLUX.1 model and LoRAs. The same seed gives the samples of training.",
    )
    add = parser.add_argument
    add("--model", required=True, help="folder of a FLUX.1 model, or its name on the hub")
    add("--variant", help="variant of the weight files, such as fp16")
    add("--lora", action="append", default=[], metavar="FILE[:WEIGHT]", help="LoRA file or folder; may be repeated")
    add("--prompt", action="append", default=[], help="what to draw; may be repeated")
    add("--prompts_file", type=Path, help=PROMPTS_HELP)
    add(
        "--size",
        type=_size,
        default=Size.square(1024),
        metavar="HxW",
        help="height x width, as in diffusers (default: 1024x1024)",
    )
    add("--num", type=_number_to(MOST_PICTURES), default=1, help="pictures per prompt (default: 1)")
    add("--steps", type=_number_to(MOST_STEPS), default=28, help="denoising steps (default: 28)")
    add("--guidance", type=merge.finite, default=3.5, help="guidance value (default: 3.5)")
    add("--seed", type=int, default=42, help="start of the random draws (default: 42)")
    add("--max_sequence_length", type=_number_to(512), default=512, help="tokens that T5 sees (default: 512)")
    add("--device", choices=["auto", "Ascend", "CPU"], default="auto", help="default: auto")
    add("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: bf16 on Ascend, no on the CPU")
    add(
        "--base_precision",
        choices=["full", "int8"],
        default="full",
        help="int8: store the transformer's matrices as int8 and compute the LoRAs beside them (default: full)",
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
    if not 0 <= given.seed < 2**32:
        problems.append(f"--seed {given.seed}: must be from 0 to 4294967295")
    request = GenerateRequest(
        config=_config(given, prompts),
        precision_given=given.mixed_precision is not None,
        loras=tuple(_weighted(text, problems) for text in given.lora),
        prompts=tuple(prompts),
        size=given.size,
        num=given.num,
        steps=given.steps,
        guidance=given.guidance,
        seed=given.seed,
        output=given.output,
    )
    problems += _output_problems(request)
    problems += _model_problems(given.model, request)
    if problems:
        raise UserError(problems)
    return request


def _config(given: argparse.Namespace, prompts: Sequence[PromptLine]) -> Config:
    return from_flat_dict(
        {
            "pretrained_model_name_or_path": given.model,
            "variant": given.variant,
            "vae_tiling": given.vae_tiling,
            "instance_data_dir": "",
            "instance_prompt": prompts[0].text if prompts else "",
            "max_sequence_length": given.max_sequence_length,
            "output_dir": str(given.output),
            "encode_cache_dir": given.encode_cache_dir,
            "device": given.device,
            "mixed_precision": given.mixed_precision or "no",
            "base_precision": given.base_precision,
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


def _model_problems(name: str, request: GenerateRequest) -> list[str]:
    if os.path.isdir(name):
        problems = check_model(Path(name), request.config)
        return [problem.replace("--pretrained_model_name_or_path", "--model") for problem in problems]
    if name.startswith((".", "~", os.sep)) or name.count("/") != 1:
        return [f"--model {name}: no such folder, and no name on the hub of the form owner/model"]
    return []


def _number_to(most: int) -> Callable[[str], int]:
    def read_number(text: str) -> int:
        value = int(text) if text.isdecimal() and len(text) <= len(str(most)) else 0
        if not 1 <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {most}, not {text}")
        return value

    return read_number


def _size(text: str) -> Size:
    size = parse_size(text) if len(text) <= 20 else None
    if size is None or any(side % PIXELS_PER_TOKEN or not 0 < side <= MOST_PIXELS for side in size):
        raise argparse.ArgumentTypeError(
            f"must be height x width in multiples of {PIXELS_PER_TOKEN} up to {MOST_PIXELS}, not {text}"
        )
    return size
