"""Samples of the small model, scored by the judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from PIL import Image

from flux_db.demo.judge import HEADS, NONE, Verdict, judge, pixels
from flux_db.errors import UserError
from flux_db.score.prompts import wanted, words

# A sample that is nearer than this to a training picture, in the root mean square of pixels from 0 to 1, is a copy.
COPY = 0.06


@dataclass(frozen=True)
class Sample:
    prompt: str
    number: int
    """Which of the prompt's pictures: it has the same starting noise at every step."""
    picture: Image.Image


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Means over samples, each from 0 to 1. None is a measure for which there are no samples."""

    subject: float | None
    """Probability that a sample of the subject shows it."""
    prompt: float | None
    """Share of what prompts of the subject ask for besides it (kind, colour, place, collar) that is in the sample."""
    class_prompt: float | None
    """The same for prompts without the subject's word."""
    class_subject: float | None
    """Probability that a sample without the subject's word shows the subject all the same: 0 is best."""
    class_change: float | None
    """How far samples without the subject's word are from those of the first round, as 1 - cosine of features."""
    likeness: float | None
    """Cosine of features between samples of the subject and the training pictures, all pairs."""
    diversity: float | None
    """1 - cosine of features among samples of the subject that share a prompt, all pairs."""
    copies: float | None
    """Share of samples of the subject that nearly are a training picture."""
    nearest: float | None
    """Distance of a sample of the subject to the nearest training picture: root mean square of pixels."""

    def as_dict(self) -> dict[str, float | None]:
        return asdict(self)


class Subject:
    """The subject of a run: its word and its pictures."""

    def __init__(self, instance_prompt: str, pictures: Sequence[Image.Image]) -> None:
        if not pictures:
            raise UserError("there are no training pictures to compare the samples with")
        self.words = wanted(instance_prompt).unknown
        if not self.words:
            raise UserError(f'instance prompt "{instance_prompt}": no word in it names a subject, such as sks')
        verdict = judge(pictures)
        mean = verdict.probabilities["subject"].mean(axis=0)
        self.name = HEADS["subject"][int(mean.argmax())]
        if self.name == NONE:
            raise UserError(
                "the judge knows none of its subjects in the training pictures: it knows the drawn world only"
            )
        self.features = verdict.features
        self.pixels = np.stack([pixels(picture) for picture in pictures])

    def is_in(self, prompt: str) -> bool:
        return not self.words.isdisjoint(words(prompt))


def score(samples: Sequence[Sample], subject: Subject, first: Sequence[Sample] = ()) -> Scores:
    """Score one round of samples; `first` are those before training."""
    ours = [sample for sample in samples if subject.is_in(sample.prompt)]
    others = [sample for sample in samples if not subject.is_in(sample.prompt)]
    mine = judge([sample.picture for sample in ours]) if ours else None
    theirs = judge([sample.picture for sample in others]) if others else None
    nearest = [distance(sample.picture, subject) for sample in ours]
    return Scores(
        subject=_mean(mine.probability("subject", subject.name)) if mine else None,
        prompt=following(ours, mine, without=subject.words) if mine else None,
        class_prompt=following(others, theirs) if theirs else None,
        class_subject=_mean(theirs.probability("subject", subject.name)) if theirs else None,
        class_change=change(others, theirs, first) if theirs else None,
        likeness=_mean((mine.features @ subject.features.T).ravel()) if mine else None,
        diversity=diversity(ours, mine.features) if mine else None,
        copies=_mean(np.array(nearest) < COPY),
        nearest=_mean(np.array(nearest)),
    )


def following(samples: Sequence[Sample], verdict: Verdict, without: frozenset[str] = frozenset()) -> float | None:
    """Share of the attributes in prompts that the judge finds in their samples."""
    best = {question: verdict.best(question) for question in HEADS}
    hits = [
        best[question][i] == answer
        for i, sample in enumerate(samples)
        for question, answer in wanted(sample.prompt).answers.items()
        if answer not in without
    ]
    return _mean(np.array(hits))


def change(samples: Sequence[Sample], verdict: Verdict, first: Sequence[Sample]) -> float | None:
    """1 - cosine of features between samples of the same prompt and noise, in the first round and in this."""
    before = {(sample.prompt, sample.number): sample.picture for sample in first}
    pairs = [(i, before[key]) for i, s in enumerate(samples) if (key := (s.prompt, s.number)) in before]
    if not pairs:
        return None
    old = judge([picture for _, picture in pairs]).features
    new = verdict.features[[i for i, _ in pairs]]
    return _mean(1.0 - (old * new).sum(axis=1))


def diversity(samples: Sequence[Sample], features: np.ndarray) -> float | None:
    distances: list[float] = []
    for prompt in dict.fromkeys(sample.prompt for sample in samples):
        rows = features[[i for i, sample in enumerate(samples) if sample.prompt == prompt]]
        upper = np.triu_indices(len(rows), k=1)
        distances += list(1.0 - (rows @ rows.T)[upper])
    return _mean(np.array(distances))


def distance(picture: Image.Image, subject: Subject) -> float:
    """To the nearest training picture: root mean square of pixels from 0 to 1."""
    differences = (pixels(picture)[None] - subject.pixels) / 2
    return float(np.sqrt((differences**2).mean(axis=(1, 2, 3))).min())


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None
