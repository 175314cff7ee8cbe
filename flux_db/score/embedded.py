"""Samples of any model, scored by the features of DINOv2 and CLIP: DreamBooth's measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from PIL import Image

from flux_db.score import measures
from flux_db.score.samples import Pictures, Sample, Texts
from flux_db.settings.subject_word import names_subject, without_subject


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Means over samples. None is a measure for which there are no samples, or no network."""

    dino: float | None
    """Cosine of DINOv2's features, samples of the subject and training pictures, all pairs."""
    clip_i: float | None
    """The same with CLIP's features of pictures."""
    clip_t: float | None
    """Cosine of CLIP's features of a sample of the subject and of its prompt without the subject's word."""
    pres: float | None
    """As dino, but of samples without the subject's word: lower is better."""
    div: float | None
    """1 - cosine of DINOv2's features among samples of the subject that share a prompt, all pairs."""
    class_change: float | None
    """How far samples without the subject's word are from those of the first round, as 1 - cosine of features."""
    nearest_likeness: float | None
    """Cosine of features between a sample of the subject and the training picture most like it."""
    copies: float | None
    """Share of samples of the subject that nearly are a training picture."""
    nearest: float | None
    """Distance of a sample of the subject to the nearest training picture: root mean square of pixels."""

    @property
    def score(self) -> float | None:
        fidelity = self.dino if self.dino is not None else self.clip_i
        return measures.overall(fidelity, self.clip_t) if fidelity is not None else None

    def as_dict(self) -> dict[str, float | None]:
        return {"score": self.score, **asdict(self)}


class Reference:
    """The subject: its word, its pictures and their features, and the networks that make such features."""

    def __init__(
        self,
        word: str,
        pictures: Sequence[Image.Image],
        *,
        dino: Pictures | None = None,
        clip: tuple[Pictures, Texts] | None = None,
    ) -> None:
        self.word = word
        self.dino = dino
        self.clip, self.texts = clip if clip else (None, None)
        self.dino_features = dino(pictures) if dino else None
        self.clip_features = self.clip(pictures) if self.clip else None
        self.pixels = np.stack([measures.small_pixels(picture) for picture in pictures])


def score(samples: Sequence[Sample], subject: Reference, first: Sequence[Sample] = ()) -> Scores:
    """Score one round of samples; `first` are those before training."""
    ours = [sample for sample in samples if names_subject(sample.prompt, subject.word)]
    others = [sample for sample in samples if not names_subject(sample.prompt, subject.word)]
    mine, theirs = (_features(subject.dino, group) for group in (ours, others))
    clip_mine = _features(subject.clip, ours)
    # what says how alike two pictures are: DINOv2, or CLIP without it
    main, of_training = (subject.dino, subject.dino_features) if subject.dino else (subject.clip, subject.clip_features)
    main_mine = mine if subject.dino else clip_mine
    nearest = np.array([measures.nearest_distance(sample.picture, subject.pixels) for sample in ours])
    return Scores(
        dino=measures.likeness(mine, subject.dino_features) if mine is not None else None,
        clip_i=measures.likeness(clip_mine, subject.clip_features) if clip_mine is not None else None,
        clip_t=_agreement(ours, clip_mine, subject) if clip_mine is not None else None,
        pres=measures.likeness(theirs, subject.dino_features) if theirs is not None else None,
        div=measures.diversity([sample.title for sample in ours], mine) if mine is not None else None,
        class_change=_change(others, first, main),
        nearest_likeness=measures.nearest_likeness(main_mine, of_training) if main_mine is not None else None,
        copies=measures.mean(nearest < measures.COPY),
        nearest=measures.mean(nearest),
    )


def _features(network: Pictures | None, samples: Sequence[Sample]) -> np.ndarray | None:
    return network([sample.picture for sample in samples]) if network and samples else None


def _agreement(samples: Sequence[Sample], features: np.ndarray, subject: Reference) -> float | None:
    prompts = list(dict.fromkeys(sample.prompt for sample in samples))
    texts = dict(zip(prompts, subject.texts([without_subject(p, subject.word) for p in prompts]), strict=True))
    return measures.agreement(features, np.stack([texts[sample.prompt] for sample in samples]))


def _change(samples: Sequence[Sample], first: Sequence[Sample], network: Pictures) -> float | None:
    keys = {sample.key for sample in samples}
    before = [sample for sample in first if sample.key in keys]
    if not before:
        return None
    old, new = (_features(network, group) for group in (before, samples))
    return measures.change([s.key for s in samples], new, [s.key for s in before], old)
