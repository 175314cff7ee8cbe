"""Commands that make what a first run needs."""

from __future__ import annotations

import argparse
from pathlib import Path

from flux_db.commands.command import Command, whole_number


def tiny_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="where to write it")
    parser.add_argument(
        "--size",
        choices=["tiny", "mid", "small"],
        default="tiny",
        help="tiny: 0.1 M parameters, mid: 9 M, both random; small: 7.6 M, which has learned to draw (default: tiny)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of tiny and mid: the same seed gives the same bytes (default: 0)"
    )


def tiny_model(arguments: argparse.Namespace) -> None:
    """Write a small FLUX.1 folder: with random weights for tests, or one that has learned a drawn world."""
    from flux_db.demo.tiny_model import write_tiny_model

    write_tiny_model(arguments.folder, arguments.size, arguments.seed)
    print(arguments.folder)


def demo_pictures_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="where to write them")
    parser.add_argument("--count", type=whole_number(1000), default=5, help="how many (default: 5)")
    parser.add_argument("--size", type=whole_number(4096), default=256, help="side in pixels (default: 256)")
    parser.add_argument(
        "--subject",
        choices=["dog", "robot", "ink"],
        default="dog",
        help="one dog, one robot, or a style: ink drawings with captions (default: dog)",
    )


def demo_pictures(arguments: argparse.Namespace) -> None:
    """Draw a few pictures of one subject to train on."""
    from flux_db.demo.pictures import write_demo_pictures

    write_demo_pictures(arguments.folder, arguments.count, arguments.size, subject=arguments.subject)
    print(arguments.folder)


COMMANDS = {
    "tiny-model": Command(tiny_model, tiny_model_flags),
    "demo-pictures": Command(demo_pictures, demo_pictures_flags),
}
