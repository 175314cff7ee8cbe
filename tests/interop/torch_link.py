"""The way to torch_side.py, which runs in the second environment; and a picture drawn here to compare."""

import json
import os
from pathlib import Path

import mindspore as ms
import numpy as np
import program
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from flux_db.model.sampler import Sampler, SampleSettings
from flux_db.parity import golden
from flux_db.size import Size

TORCH_VARIABLES = program.environment(PYTHONPATH=str(program.ROOT))


def ask_torch(command, model, folder, arrays=None, **settings):
    """Run a command of torch_side.py; returns its arrays and facts."""
    given, got = folder / f"{command}.in.safetensors", folder / f"{command}.out.safetensors"
    arrays = {name: np.ascontiguousarray(value) for name, value in (arrays or {"none": np.zeros(1)}).items()}
    save_file(arrays, given, {"settings": json.dumps(settings)})
    run_torch(Path(__file__).with_name("torch_side.py"), command, model, given, got)
    with safe_open(got, "numpy") as file:
        return load_file(got), json.loads(file.metadata()["facts"])


def run_torch(*words):
    """A script in the second environment, with none of this process's variables: some change how torch computes."""
    done = program.run([os.environ["FLUX_DB_TORCH_PYTHON"], *map(str, words)], env=TORCH_VARIABLES, timeout=900)
    assert done.returncode == 0, done.stderr


def draw_here(model, transformer, request):
    settings = SampleSettings(size=Size.square(64), steps=4, guidance=golden.GUIDANCE)
    pixels = Sampler(model, transformer, ms.float32).pixels([request], settings)[0]
    return np.clip(pixels / 2 + 0.5, 0, 1)
