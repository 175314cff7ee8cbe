"""Samples of prompts with options, drawn while training and by generate."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from world import lora_bytes, train

from flux_db.__main__ import main
from flux_db.model import runtime
from flux_db.run import sample_files

PROMPT = "a photo of sks dog"
LINES = f"{PROMPT}\n{PROMPT} --w 48 --h 32 --seed 3 --steps 1 --guidance 2\n{PROMPT} --lora 0\n{PROMPT} --lora 0.5\n"
SETTINGS = {
    "max_train_steps": 4,
    "learning_rate": 0.05,
    "validation_steps": 2,
    "checkpointing_steps": 2,
    "num_validation_images": 1,
    "validation_inference_steps": 2,
}


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text(LINES)
    return str(path)


@pytest.fixture(scope="module")
def drawn(cpu, world, prompts_file, tmp_path_factory):
    config = world.config(tmp_path_factory.mktemp("drawn") / "out", **SETTINGS, validation_prompts_file=prompts_file)
    assert train(config) == 0
    return config


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def sample(output, step, number):
    return pixels(output / f"samples/step-{step:05d}/{number:02d}.png")


def test_samples_have_their_options(drawn):
    output = Path(drawn.output.output_dir)
    rounds = sample_files.read_rounds(output)
    assert [round_.step for round_ in rounds] == [0, 2, 4]
    first = rounds[0].pictures
    assert [picture.options for picture in first] == [
        "",
        "--w 48 --h 32 --seed 3 --steps 1 --guidance 2",
        "--lora 0",
        "--lora 0.5",
    ]
    assert [Image.open(picture.path).size for picture in first] == [(32, 32), (48, 32), (32, 32), (32, 32)]
    assert Image.open(first[1].path).info["seed"] == "3"
    # without its LoRA the model draws what it drew before the first step
    assert np.array_equal(sample(output, 4, 2), sample(output, 0, 0))
    whole, half = (np.abs(sample(output, 4, n) - sample(output, 0, n)).mean() for n in (0, 3))
    assert 0 < half < whole
    page = (output / "report.html").read_text()
    assert "--w 48 --h 32 --seed 3 --steps 1 --guidance 2" in page and "--lora 0.5" in page


def test_drawing_with_another_strength_leaves_the_weights_as_they_were(drawn, world, tmp_path):
    plain = world.config(tmp_path / "plain", **SETTINGS)
    assert train(plain) == 0
    assert lora_bytes(tmp_path / "plain") == lora_bytes(Path(drawn.output.output_dir))


def test_a_resumed_run_draws_the_same_samples_with_options(drawn, world, prompts_file, tmp_path):
    output = Path(drawn.output.output_dir)
    settings = SETTINGS | {"validation_prompts_file": prompts_file}
    assert train(world.config(tmp_path / "out", **settings | {"max_train_steps": 2})) == 0
    assert train(world.config(tmp_path / "out", **settings, resume_from_checkpoint="latest")) == 0
    assert lora_bytes(tmp_path / "out") == lora_bytes(output)
    for number in range(4):
        assert np.array_equal(sample(tmp_path / "out", 4, number), sample(output, 4, number))


def test_generate_draws_the_same_lines(drawn, cpu, world, prompts_file, tmp_path, monkeypatch):
    output = Path(drawn.output.output_dir)
    monkeypatch.setattr(runtime, "start", lambda _: cpu)
    words = [
        "generate", "--model", str(world.model), "--lora", str(output), "--size", "32x32", "--steps", "2",
        "--prompts_file", prompts_file, "--max_sequence_length", "16", "--device", "CPU",
        "--encode_cache_dir", drawn.data.encode_cache_dir, "-o", str(tmp_path / "out"),
    ]  # fmt: skip
    assert main(words) == 0
    for number in range(4):
        path = tmp_path / "out" / f"{number:03d}-00.png"
        # merged weights differ in rounding
        assert np.abs(pixels(path) - sample(output, 4, number)).max() <= 1
        assert Image.open(path).info.get("options", "") == LINES.splitlines()[number].removeprefix(PROMPT).strip()
