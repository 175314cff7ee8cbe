"""Prompt, number, seed and options of a sample, stored in its PNG file."""

from PIL import PngImagePlugin


def sample_text(prompt: str, number: int, seed: int, options: str = "") -> PngImagePlugin.PngInfo:
    """`options`: those of the prompt's line, such as --w 768."""
    about = PngImagePlugin.PngInfo()
    about.add_itxt("prompt", prompt)
    about.add_text("number", str(number))
    about.add_text("seed", str(seed))
    if options:
        about.add_text("options", options)
    return about
