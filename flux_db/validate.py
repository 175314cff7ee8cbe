"""Sample pictures while training: when they are due, and where they go."""

from __future__ import annotations

import math
from pathlib import Path

from PIL import Image

from flux_db import encode
from flux_db.config import Config, validation_prompts
from flux_db.console import say, stage
from flux_db.encode import Cache
from flux_db.report import Reporter
from flux_db.sample import Request, Sampler, SampleSettings, grid

SAMPLES = "samples"
GRID = "grid.png"


def steps_between(config: Config, pictures: int, global_batch: int) -> int | None:
    """Optimizer steps from one round of samples to the next; None without prompts."""
    if not config.validation.validation_prompt:
        return None
    if config.validation.validation_steps is not None:
        return config.validation.validation_steps
    return max(1, math.ceil(config.validation.validation_epochs * pictures / global_batch))


class Validator:
    """Draws the same pictures (prompt and starting noise) at different steps, so that they can be compared."""

    def __init__(self, config: Config, cache: Cache, sampler: Sampler, reporter: Reporter) -> None:
        self.folder = Path(config.output.output_dir, SAMPLES)
        self.sampler = sampler
        self.reporter = reporter
        validation = config.validation
        self.requests = [
            Request(**encode.read(cache.prompt_file(prompt)), seed=config.output.seed, number=number)
            for prompt in validation_prompts(config)
            for number in range(validation.num_validation_images)
        ]
        self.settings = SampleSettings(
            height=config.data.resolution,
            width=config.data.resolution,
            steps=validation.validation_inference_steps,
            guidance=validation.validation_guidance,
        )

    def run(self, step: int) -> None:
        """Draw and store a round; a failure is reported and does not end the training."""
        try:
            with stage(f"Drawing {len(self.requests)} samples at step {step}"):
                pictures = list(self.sampler.draw(self.requests, self.settings))
            self._store(pictures, step)
        except Exception as problem:
            say(f"warning: no samples at step {step}: {type(problem).__name__}: {problem}; training goes on")
            self.reporter.event({"step": step, "event": "validation failed", "message": str(problem)})

    def _store(self, pictures: list[Image.Image], step: int) -> None:
        folder = self.folder / f"step-{step:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(pictures):
            picture.save(folder / f"{number:02d}.png")
        rows = [
            [Image.open(path).convert("RGB") for path in sorted(round_.glob("*.png"))]
            for round_ in sorted(self.folder.glob("step-*"))
        ]
        sheet = grid([row for row in rows if row])
        sheet.save(self.folder / GRID)
        self.reporter.picture("samples", grid([pictures]), step)
