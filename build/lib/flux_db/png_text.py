"""Prompt, number and seed of a sample, stored in its PNG file."""

from PIL import PngImagePlugin


def sample_text(prompt: str, number: int, seed: int) -> PngImagePlugin.PngInfo:
    about = PngImagePlugin.PngInfo()
    about.add_itxt("prompt", prompt)
    about.add_text("number", str(number))
    about.add_text("seed", str(seed))
    return about
