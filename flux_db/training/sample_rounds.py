"""Sample pictures while training: when they are due, who draws which, and where they go."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mindspore import nn
from PIL import Image

from flux_db.atomic import write_png
from flux_db.console import counted, say, stage
from flux_db.data.encode_cache import Cache
from flux_db.model import adapter
from flux_db.model.runtime import Runtime
from flux_db.model.sampler import Group, Request, Sampler, SampleSettings, grid, groups, to_picture
from flux_db.output_folder import GRID, SAMPLES
from flux_db.report.sample_sheet import sample_sheet
from flux_db.run import sample_files
from flux_db.run.metrics_file import ROUND_FAILED
from flux_db.run.metrics_log import MetricsLog
from flux_db.settings.derived import sample_prompts, validation_prompts, validation_size
from flux_db.settings.schema import Config
from flux_db.training.text_vectors import TextVectors


def steps_between(config: Config, pictures: int, global_batch: int) -> int | None:
    """Optimizer steps from one validation to the next; None if there is nothing to validate."""
    validation = config.validation
    if not validation_prompts(config) and not validation.has_held_out:
        return None
    if validation.validation_steps is not None:
        return validation.validation_steps
    return max(1, math.ceil(validation.validation_epochs * pictures / global_batch))


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """When there are validation rounds, and when their samples are scored."""

    every: int | None
    """Steps from one round to the next; None without validation."""
    score_every: int | None
    total_steps: int

    def is_due(self, step: int) -> bool:
        """There is a round wherever samples are scored."""
        return is_due(step, self.every, self.total_steps) or self.is_scored(step)

    def is_scored(self, step: int) -> bool:
        return is_due(step, self.score_every, self.total_steps)


def rounds_of(config: Config, pictures: int, global_batch: int, total_steps: int) -> Rounds:
    return Rounds(
        every=steps_between(config, pictures, global_batch),
        score_every=config.validation.score_steps if validation_prompts(config) else None,
        total_steps=total_steps,
    )


def is_due(step: int, every: int | None, total_steps: int) -> bool:
    """Whether there is a validation round at a step: at the first, at the last, and between them."""
    return every is not None and (step in (0, total_steps) or step % every == 0)


class Validator:
    """Draws the same pictures (prompt and starting noise) at different steps, so that they can be compared.

    Every rank draws its share of them into files; the first rank then puts all into one sheet.
    """

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        cache: Cache,
        sampler: Sampler,
        metrics_log: MetricsLog,
        vectors: TextVectors | None = None,
    ) -> None:
        self.output = Path(config.output.output_dir)
        self.runtime = runtime
        # a transformer spread over the ranks needs all of them for every forward
        self.even = config.runtime.shard_base
        self.sampler = sampler
        self.metrics_log = metrics_log
        self.vectors = vectors or TextVectors(cache, None)
        validation = config.validation
        numbers = range(validation.num_validation_images)
        self.lines = [line for line in sample_prompts(config) for _ in numbers]
        self.requests = [
            Request(
                **cache.read(cache.prompt_file(line.text)),
                seed=validation.validation_seed if line.seed is None else line.seed,
                number=number,
            )
            for line in sample_prompts(config)
            for number in numbers
        ]
        usual = SampleSettings(
            size=validation_size(config),
            steps=validation.validation_inference_steps,
            guidance=validation.validation_guidance,
        )
        self.groups = groups(self.lines, usual)

    def run(self, step: int) -> None:
        """Draw and store a round, on all ranks at once. A failure is reported and does not end the training."""
        text = f"Drawing {counted(len(self.requests), 'sample')} at step {step}"
        with stage(text) if self.runtime.is_main else nullcontext():
            problem = self._draw(step)
            # no rank goes on, or reads the files, before all have done their share
            failures = int(self.runtime.sum(np.array([problem is not None], np.float32))[0])
        if failures:
            self._warn(step, problem or f"drawing failed on {failures} of {self.runtime.world_size} ranks")
        if self.runtime.is_main:
            try:
                self._show(step)
            except Exception as error:
                self._warn(step, _describe(error))

    def _draw(self, step: int) -> str | None:
        """Draw this rank's share of the requests into files; returns what went wrong, if anything did."""
        try:
            folder = sample_files.round_folder(self.output, step)
            folder.mkdir(parents=True, exist_ok=True)
            # all before the first is looked at: if one of them is bad, the other ranks still find this one drawing
            drawn = {number: pixels for group in self.groups for number, pixels in self._draw_group(group)}
            for number, pixels in drawn.items():
                request, line = self.requests[number], self.lines[number]
                sample_files.write(
                    folder / f"{number:02d}.png",
                    to_picture(pixels),
                    prompt=line.text,
                    number=request.number,
                    seed=request.seed,
                    options=line.options,
                )
        except Exception as error:
            return _describe(error)
        return None

    def _draw_group(self, group: Group) -> list[tuple[int, np.ndarray]]:
        """The pictures of a group that are this rank's, by number; with CLIP and the LoRA as they are now."""
        if self.even:
            # within each group, so that all ranks take as many denoising steps
            places = self.runtime.share(len(group.numbers), even=True)
            mine = [(group.numbers[place], self.runtime.has_turn(place)) for place in places]
        else:
            mine = [(number, True) for number in group.numbers if self.runtime.has_turn(number)]
        if not mine:
            return []
        with adapter.strength(self._networks() if group.lora != 1 else [], group.lora):
            pooled = self.vectors.of(self.lines[number].text for number, _ in mine)
            requests = [
                dataclasses.replace(self.requests[number], pooled_prompt_embeds=pooled[self.lines[number].text])
                for number, _ in mine
            ]
            drawn = list(self.sampler.draw_pixels(requests, group.settings))
        return [(number, pixels) for (number, has_turn), pixels in zip(mine, drawn, strict=True) if has_turn]

    def _networks(self) -> list[nn.Cell]:
        """Those that have a LoRA."""
        clip = self.vectors.text_encoder
        return [self.sampler.transformer] if clip is None else [self.sampler.transformer, clip]

    def _show(self, step: int) -> None:
        rounds = sample_files.read_rounds(self.output)
        if not rounds:
            return
        write_png(self.output / SAMPLES / GRID, sample_sheet(rounds))
        latest = [round_ for round_ in rounds if round_.step == step]
        if latest:
            pictures = [Image.open(picture.path).convert("RGB") for picture in latest[0].pictures]
            self.metrics_log.picture("samples", grid([pictures]), step)

    def _warn(self, step: int, problem: str) -> None:
        say(f"warning: not all samples at step {step}: {problem}; training goes on")
        self.metrics_log.event({"step": step, "event": ROUND_FAILED, "message": problem})


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
