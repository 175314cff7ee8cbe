"""Training on an int8 base, through the command line."""

import numpy as np
from program import command, run, trainer
from safetensors.numpy import load_file

from flux_db.output_folder import LORA_FILE

DRAWN = {"validation_prompt": "a photo of sks dog", "validation_epochs": 1000, "validation_inference_steps": 2}


def trained(world, output, **changes):
    done = run(trainer(world.settings(output, base_precision="int8", lora_dropout=0.1, **changes)), timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(output / LORA_FILE)


def test_a_run_on_int8_learns_draws_resumes_exactly_and_its_lora_draws_beside_int8(world, tmp_path):
    whole = trained(world, tmp_path / "whole", **DRAWN)
    assert list((tmp_path / "whole" / "samples").rglob("*.png"))
    ups = [value for name, value in whole.items() if "lora_B" in name]
    assert ups and all(np.isfinite(value).all() and np.abs(value).max() > 0 for value in ups)

    # from a stored int8 model the run is the same; in two parts too
    done = run(command("quantize", world.model, "-o", tmp_path / "small"))
    assert done.returncode == 0, done.stderr
    model = str(tmp_path / "small")
    trained(world, tmp_path / "parts", pretrained_model_name_or_path=model, max_train_steps=2)
    resumed = {"resume_from_checkpoint": "latest", "pretrained_model_name_or_path": model}
    other = run(trainer(world.settings(tmp_path / "parts", lora_dropout=0.1, **resumed)))
    assert other.returncode == 2 and "--base_precision int8" in other.stderr
    parts = trained(world, tmp_path / "parts", **resumed)
    assert parts.keys() == whole.keys() and all((parts[name] == whole[name]).all() for name in whole)

    # on the original model, another precision than the checkpoint's is a change of the result
    done = run(trainer(world.settings(tmp_path / "whole", lora_dropout=0.1, resume_from_checkpoint="latest", **DRAWN)))
    assert done.returncode == 2 and "base_precision: 'int8' in the checkpoint, 'full' now" in done.stderr

    words = ["--model", model, "--base_precision", "int8", "--lora", tmp_path / "whole", "--prompt", "a dog"]
    words += ["--size", "32x32", "--steps", "2", "--max_sequence_length", "16", "-o", tmp_path / "drawn"]
    done = run(command("generate", *words))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "drawn" / "grid.png").is_file()

    done = run(command("fuse", model, tmp_path / "whole", "-o", tmp_path / "fused"))
    assert done.returncode == 2 and "is of type I8 in the model, and no LoRA can be merged into that" in done.stderr
