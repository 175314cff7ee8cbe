"""Samples of the small model, scored by the judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from PIL import Image

from flux_db.demo.judge import HEADS, NONE, Verdict, judge
from flux_db.errors import UserError
from flux_db.score import measures
from flux_db.score.prompts import wanted, words
from flux_db.score.samples import Sample


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Means over samples, each from 0 to 1. None is a measure for which there are no samples."""

    subject: float | None
    """Probability that a sample of the subject shows it; None also of a subject that the judge does not know."""
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

    @property
    def score(self) -> float | None:
        return measures.overall(self.subject, self.prompt) if self.subject is not None else None

    def as_dict(self) -> dict[str, float | None]:
        return {"score": self.score, **asdict(self)}


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
        """NONE: the judge does not know it."""
        self.features = verdict.features
        self.pixels = np.stack([measures.small_pixels(picture) for picture in pictures])

    @property
    def is_known(self) -> bool:
        return self.name != NONE

    def shown(self, verdict: Verdict) -> float | None:
        """Probability that the pictures show the subject."""
        return measures.mean(verdict.probability("subject", self.name)) if self.is_known else None

    def is_in(self, prompt: str) -> bool:
        return not self.words.isdisjoint(words(prompt))


def score(samples: Sequence[Sample], subject: Subject, first: Sequence[Sample] = ()) -> Scores:
    """Score one round of samples; `first` are those before training."""
    ours = [sample for sample in samples if subject.is_in(sample.prompt)]
    others = [sample for sample in samples if not subject.is_in(sample.prompt)]
    mine = judge([sample.picture for sample in ours]) if ours else None
    theirs = judge([sample.picture for sample in others]) if others else None
    nearest = np.array([measures.nearest_distance(sample.picture, subject.pixels) for sample in ours])
    return Scores(
        subject=subject.shown(mine) if mine else None,
        prompt=following(ours, mine, without=subject.words) if mine else None,
        class_prompt=following(others, theirs) if theirs else None,
        class_subject=subject.shown(theirs) if theirs else None,
        class_change=change(others, theirs, first) if theirs else None,
        likeness=measures.likeness(mine.features, subject.features) if mine else None,
        diversity=measures.diversity([sample.title for sample in ours], mine.features) if mine else None,
        copies=measures.mean(nearest < measures.COPY),
        nearest=measures.mean(nearest),
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
    return measures.mean(np.array(hits))


def change(samples: Sequence[Sample], verdict: Verdict, first: Sequence[Sample]) -> float | None:
    """1 - cosine of features between samples of the same prompt and noise, in the first round and in this."""
    keys = [sample.key for sample in samples]
    before = [sample for sample in first if sample.key in keys]
    if not before:
        return None
    features = judge([sample.picture for sample in before]).features
    return measures.change(keys, verdict.features, [s.key for s in before], features)
