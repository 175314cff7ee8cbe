"""What scores the samples of a run: the judge of the drawn world, or DINOv2 and CLIP."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from PIL import Image

from flux_db.demo.judge import identity
from flux_db.errors import UserError
from flux_db.model import model_folder, scoring_folder
from flux_db.score import judged
from flux_db.score.samples import Sample
from flux_db.settings.subject_word import names_subject

JUDGE = "judge"


class Scores(Protocol):
    """The scores of a round, by the judge or by features."""

    @property
    def score(self) -> float | None:
        """One number for the round: the geometric mean of how well it shows the subject and follows its prompts."""

    def as_dict(self) -> dict[str, float | None]: ...


@dataclass(frozen=True, kw_only=True)
class Scorer:
    by: str
    """judge, dinov2, clip or dinov2+clip"""
    fingerprint: str
    """Of the networks: scores with different ones cannot be compared."""
    names_subject: Callable[[str], bool]
    """Whether a prompt asks for the subject."""
    score: Callable[[Sequence[Sample], Sequence[Sample]], Scores]
    """A round of samples, and those before training."""
    unmeasured: str | None = None
    """What it cannot measure of this subject; None: nothing."""


@dataclass(frozen=True, kw_only=True)
class Folders:
    """Where DINOv2 and CLIP are; None: without it."""

    dino: Path | None = None
    clip: Path | None = None

    def __bool__(self) -> bool:
        return self.dino is not None or self.clip is not None


def locate(dino: str | None, clip: str | None, *, prefix: str = "", cache_dir: str | None = None) -> Folders:
    """The folders that --dino and --clip name, fetched if needed; with the prefix score_ those are the trainer's."""
    return Folders(
        dino=scoring_folder.locate(dino, f"--{prefix}dino", "dinov2", cache_dir) if dino else None,
        clip=scoring_folder.locate(clip, f"--{prefix}clip", "clip", cache_dir) if clip else None,
    )


def by_judge(instance_prompt: str, pictures: Sequence[Image.Image]) -> Scorer:
    """For samples of the small model."""
    subject = judged.Subject(instance_prompt, pictures)
    unknown = (
        "the judge knows subjects of the demo's drawn world alone, and finds none of them in the training pictures"
    )
    return Scorer(
        by=JUDGE,
        fingerprint=identity(),
        names_subject=subject.is_in,
        score=lambda samples, first: judged.score(samples, subject, first),
        unmeasured=None if subject.is_known else unknown,
    )


def by_features(word: str, pictures: Sequence[Image.Image], folders: Folders) -> Scorer:
    """Load the networks. MindSpore must have been started."""
    from flux_db.score import embedded, encoders

    if not pictures:
        raise UserError("there are no training pictures to compare the samples with")
    dino = encoders.dinov2(folders.dino) if folders.dino else None
    clip = encoders.clip(folders.clip) if folders.clip else None
    subject = embedded.Reference(word, pictures, dino=dino, clip=clip)
    used = {"dinov2": folders.dino, "clip": folders.clip}
    prints = {name: model_folder.fingerprint(folder, ["."]) for name, folder in used.items() if folder}
    return Scorer(
        by="+".join(prints),
        fingerprint=hashlib.sha256(json.dumps(prints).encode()).hexdigest()[:12],
        names_subject=lambda prompt: names_subject(prompt, word),
        score=lambda samples, first: embedded.score(samples, subject, first),
    )
