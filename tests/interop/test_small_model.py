"""The small model loads in diffusers as in this program, and draws the same pictures there, from prompt to pixels."""

from itertools import pairwise

import numpy as np
import program
from PIL import Image
from torch_link import ask_torch

from flux_db.stream import Purpose, generator

PROMPTS = ["a photo of a brown dog on the beach", "a red car in the city", "a photo of sks dog at night"]
STEPS, GUIDANCE, TOKENS, SEED = 4, 3.5, 20, 7


def test_the_small_model_draws_the_same_pictures_there(tmp_path):
    model = tmp_path / "model"
    assert program.run(program.command("tiny-model", "--size", "small", model)).returncode == 0
    flags = {"model": model, "prompt": PROMPTS, "size": "64x64", "steps": STEPS, "guidance": GUIDANCE, "seed": SEED}
    flags |= {"max_sequence_length": TOKENS, "device": "CPU", "output": tmp_path / "here"}
    done = program.run(program.command("generate", *program.flags(flags)))
    assert done.returncode == 0, done.stderr
    files = [tmp_path / "here" / f"{i:03}-00.png" for i in range(len(PROMPTS))]
    here = np.stack([np.asarray(Image.open(file), np.float32).transpose(2, 0, 1) / 255 for file in files])
    # every prompt's first picture starts from the same noise
    noise = np.stack([generator(SEED, 0, Purpose.SAMPLE).standard_normal((8, 16, 16), np.float32)] * len(PROMPTS))
    settings = {"prompts": PROMPTS, "steps": STEPS, "guidance": GUIDANCE, "tokens": TOKENS}
    there, facts = ask_torch("draw_prompts", model, tmp_path, {"noise": noise}, **settings)
    assert facts["remarks"] == []
    error = np.abs(here - there["pictures"]).max()
    print(f"pictures {error:.1e}, rounded to 256 levels here")
    assert error <= 1 / 255
    assert min(np.abs(a - b).mean() for a, b in pairwise(here)) > 0.05
