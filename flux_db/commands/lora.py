"""Commands around finished LoRA files."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from flux_db.atomic import write_file
from flux_db.commands.command import Command, whole_number
from flux_db.console import printable
from flux_db.errors import RunError, UserError, unwritable


def export_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lora", help="LoRA file of diffusers, peft, kohya, ComfyUI or OneTrainer; or its folder")
    parser.add_argument("--format", required=True, choices=["diffusers", "kohya", "comfyui"], help="what to write")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="file to write")


def export(arguments: argparse.Namespace) -> None:
    """Convert a LoRA file to the format of another program."""
    from flux_db.lora import convert, lora_file
    from flux_db.weight_file import to_bytes

    source = lora_file.read(arguments.lora)
    output = _new_file(arguments.output)
    _write(output, to_bytes(*convert.convert(source, arguments.format)))
    print(printable(str(output)))


def info_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lora", help="LoRA file, or its folder")


def info(arguments: argparse.Namespace) -> None:
    """Describe a LoRA file: format, rank, alpha, layers, strength, metadata."""
    from flux_db.lora import describe

    print(describe.describe(arguments.lora))


def fuse_flags(parser: argparse.ArgumentParser) -> None:
    from flux_db.lora.drawn_with import finite

    parser.add_argument("model", type=Path, help="folder of a FLUX.1 model in diffusers layout")
    parser.add_argument("lora", type=Path, help="LoRA file of any format, or its folder")
    parser.add_argument("--scale", type=finite, default=1.0, help="strength of the LoRA (default: 1)")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="folder to write")


def fuse(arguments: argparse.Namespace) -> None:
    """Write a model folder with a LoRA merged into its transformer.

    The weights keep their type and files; parts that do not change are hard links to the model's files where that is
    possible."""
    from flux_db.lora import merge

    if not arguments.model.is_dir():
        raise UserError(f"{arguments.model}: no such folder; give the folder of a FLUX.1 model")
    merge.fuse(arguments.model, [merge.Weighted(arguments.lora, arguments.scale)], arguments.output)
    print(printable(str(arguments.output)))


def quantize_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="folder of a FLUX.1 model in diffusers layout")
    parser.add_argument("--variant", help="variant of the weight files, such as fp16")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="folder to write")


def quantize(arguments: argparse.Namespace) -> None:
    """Write a model folder whose transformer is stored as int8, for --base_precision int8.

    The run is the same as from the original model, which the flag quantises while loading; the folder is half as large
    and loads faster. Parts that do not change are hard links to the model's files where that is possible."""
    from flux_db.model import quantize as quantizer

    if not arguments.model.is_dir():
        raise UserError(f"{arguments.model}: no such folder; give the folder of a FLUX.1 model")
    quantizer.quantize(arguments.model, arguments.output, arguments.variant)
    print(printable(str(arguments.output)))


def resize_flags(parser: argparse.ArgumentParser) -> None:
    from flux_db.lora.peft_settings import RANK_LIMIT

    parser.add_argument("lora", type=Path, help="LoRA file of any format, or its folder")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--rank", type=whole_number(RANK_LIMIT), help="rank of every layer; smaller where less will do")
    size.add_argument(
        "--keep", type=_share, metavar="SHARE", help="instead: each layer as small as keeps this share, such as 0.95"
    )
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="file to write")


def resize(arguments: argparse.Namespace) -> None:
    """Write a LoRA of another rank that does nearly the same, and print how nearly.

    The layers become the nearest matrices of the new rank, by singular values. --keep is a share of their sum of
    squares, layer by layer. The file has diffusers' keys; export converts it."""
    from flux_db.lora import lora_file

    metadata = lora_file.read(arguments.lora).metadata
    _write_resized([str(arguments.lora)], arguments, metadata, keep=arguments.keep)


def merge_loras_flags(parser: argparse.ArgumentParser) -> None:
    from flux_db.lora.peft_settings import RANK_LIMIT

    parser.add_argument("loras", nargs="+", metavar="FILE[:WEIGHT]", help="LoRA files of any format, or their folders")
    parser.add_argument("--rank", required=True, type=whole_number(RANK_LIMIT), help="rank of the result")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="file to write")


def merge_loras(arguments: argparse.Namespace) -> None:
    """Write one LoRA that does what several do together, and print how nearly.

    Exact if the rank is the sum of theirs; below that the nearest, by singular values. The file has diffusers' keys;
    export converts it."""
    _write_resized(arguments.loras, arguments, {})


def _write_resized(
    loras: list[str], arguments: argparse.Namespace, metadata: dict[str, str], keep: float | None = None
) -> None:
    from flux_db.lora import merge
    from flux_db.lora.resize import resize, to_file

    try:
        files = [merge.weighted(text) for text in loras]
    except ValueError as problem:
        raise UserError(str(problem)) from None
    output = _new_file(arguments.output)
    made = resize(merge.read_all(files), rank=arguments.rank, keep=keep)
    names = " + ".join(f"{file.weight:g} x {file.path.name}" for file in files)
    _write(output, to_file(made, metadata, f"{names}, rank {made.ranks}"))
    print(f"{printable(str(output))}: rank {made.ranks}, relative error {made.error:.4f}")


def _share(text: str) -> float:
    from flux_db.lora.drawn_with import finite

    value = finite(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not {text}")
    return value


def generate(argv: list[str]) -> None:
    """Draw pictures with a FLUX.1 model and any number of LoRAs."""
    from flux_db.lora import generate_flags

    request = generate_flags.read(argv)
    from flux_db.lora import generate as drawing

    print(printable(str(drawing.run(request, argv))))


def encode_prompts(argv: list[str]) -> None:
    """Encode prompts into the cache; takes the flags of generate, which starts it."""
    from flux_db.lora import generate_flags

    request = generate_flags.read(argv)
    from flux_db.lora import generate as drawing

    drawing.encode_prompts(request)


def push_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="--output_dir of the run")
    parser.add_argument("--hub_model_id", required=True, metavar="OWNER/NAME", help="where to upload to")
    parser.add_argument("--hub_private", action=argparse.BooleanOptionalAction, default=True, help="default: private")


def push(arguments: argparse.Namespace) -> None:
    """Upload a finished run to the Hugging Face hub, as --push_to_hub does after training.

    The token is that of hf auth login, or HF_TOKEN."""
    from flux_db.report import hub

    output = hub.find_run(arguments.folder)
    try:
        print(hub.push(output, arguments.hub_model_id, private=arguments.hub_private))
    except hub.PushFailed as problem:
        raise RunError(f"the upload failed: {problem}") from problem


def _write(output: Path, data: bytes) -> None:
    try:
        write_file(output, data)
    except OSError as problem:
        raise unwritable(f"-o {output}: could not be written", problem) from problem


def _new_file(path: Path) -> Path:
    if os.path.isdir(path):
        raise UserError(f"-o {path}: is a folder; give the name of a file")
    if os.path.lexists(path):
        raise UserError(f"-o {path}: exists already; remove it first, or choose another name")
    if not os.path.isdir(path.absolute().parent):
        raise UserError(f"-o {path}: there is no folder {path.parent}; make it first")
    return path


COMMANDS = {
    "generate": Command(generate),
    "encode-prompts": Command(encode_prompts),
    "info": Command(info, info_flags),
    "export": Command(export, export_flags),
    "fuse": Command(fuse, fuse_flags),
    "quantize": Command(quantize, quantize_flags),
    "resize": Command(resize, resize_flags),
    "merge-loras": Command(merge_loras, merge_loras_flags),
    "push": Command(push, push_flags),
}
