"""The measures by plain loops on known features, and the word that distinguishes samples of the subject."""

import math

import numpy as np
import pytest
from PIL import Image

from flux_db.score import embedded, measures
from flux_db.score.samples import Sample
from flux_db.settings.subject_word import names_subject, subject_word, without_subject

BEACH, SNOW, CLASS = "a photo of sks dog on the beach", "sks dog in snow", "a photo of a dog"


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def average(values):
    values = list(values)
    return sum(values) / len(values)


class Known:
    """A network whose features are those that a picture's red channel names."""

    def __init__(self, seed):
        self.table = np.random.default_rng(seed).standard_normal((256, 7))
        self.asked = []

    def __call__(self, items):
        self.asked += list(items)
        return measures.unit_rows(self.table[[self.number(item) for item in items]])

    @staticmethod
    def number(item):
        return len(item) if isinstance(item, str) else item.getpixel((0, 0))[0]

    def of(self, item):
        return self.table[self.number(item)].tolist()


def picture(number):
    return Image.new("RGB", (32, 48), (number, 0, 0))


SAMPLES = [
    *(Sample(BEACH, i, picture(100 + 10 * i)) for i in range(3)),
    *(Sample(SNOW, i, picture(150 + 10 * i)) for i in range(2)),
    *(Sample(CLASS, i, picture(180 + 10 * i)) for i in range(2)),
]
FIRST = [Sample(CLASS, i, picture(220 + 10 * i)) for i in range(2)] + [Sample(BEACH, 0, picture(5))]
TRAINING = [picture(i) for i in (20, 50, 101)]


def test_all_measures_are_the_plain_formulas():
    dino, clip, texts = Known(1), Known(2), Known(3)
    reference = embedded.Reference("sks", TRAINING, dino=dino, clip=(clip, texts))
    found = embedded.score(SAMPLES, reference, FIRST)
    ours, others = [s.picture for s in SAMPLES[:5]], [s.picture for s in SAMPLES[5:]]
    assert found.dino == pytest.approx(average(cosine(dino.of(a), dino.of(b)) for a in ours for b in TRAINING))
    assert found.clip_i == pytest.approx(average(cosine(clip.of(a), clip.of(b)) for a in ours for b in TRAINING))
    said = {BEACH: "a photo of dog on the beach", SNOW: "dog in snow"}
    assert sorted(texts.asked) == sorted(said.values()), "without the subject's word"
    assert found.clip_t == pytest.approx(
        average(cosine(clip.of(s.picture), texts.of(said[s.prompt])) for s in SAMPLES[:5])
    )
    assert found.pres == pytest.approx(average(cosine(dino.of(a), dino.of(b)) for a in others for b in TRAINING))
    pairs = [(0, 1), (0, 2), (1, 2), (3, 4)]
    assert found.div == pytest.approx(average(1 - cosine(dino.of(ours[a]), dino.of(ours[b])) for a, b in pairs))
    change = average(1 - cosine(dino.of(a), dino.of(b.picture)) for a, b in zip(others, FIRST[:2], strict=True))
    assert found.class_change == pytest.approx(change)
    nearest = average(max(cosine(dino.of(a), dino.of(b)) for b in TRAINING) for a in ours)
    assert found.nearest_likeness == pytest.approx(nearest)
    # 100 is next to 101 of the training pictures; the others are at least 9 of 255 away, in one of three channels
    assert found.copies == pytest.approx(3 / 5)
    distances = [min(abs(s.picture.getpixel((0, 0))[0] - n) for n in (20, 50, 101)) for s in SAMPLES[:5]]
    assert found.nearest == pytest.approx(average(d / 255 / math.sqrt(3) for d in distances), rel=1e-5)


def test_the_score_is_the_geometric_mean_of_what_was_measured():
    def score(**values):
        return embedded.Scores(**{name: None for name in embedded.Scores.__annotations__} | values).score

    assert score(dino=0.6, clip_t=0.3, clip_i=0.9) == pytest.approx(math.sqrt(0.18))
    assert score(clip_i=0.8, clip_t=0.2) == pytest.approx(0.4)
    assert score(dino=0.5) == 0.5
    assert score(dino=-0.2, clip_t=0.3) == 0.0
    assert score() is None and score(clip_t=0.3) is None, "nothing of the subject"


def test_what_there_is_nothing_for_is_none():
    reference = embedded.Reference("sks", TRAINING, dino=Known(1))
    assert embedded.score([], reference).as_dict() == {"score": None, **dict.fromkeys(embedded.Scores.__annotations__)}
    alone = embedded.score(SAMPLES[:1], reference)
    assert alone.dino is not None and alone.score == max(alone.dino, 0)
    assert (alone.clip_i, alone.clip_t, alone.pres, alone.div, alone.class_change) == (None,) * 5
    by_clip = embedded.score(SAMPLES, embedded.Reference("sks", TRAINING, clip=(Known(2), Known(3))), FIRST)
    assert (by_clip.dino, by_clip.pres, by_clip.div) == (None,) * 3
    assert None not in (by_clip.clip_i, by_clip.clip_t, by_clip.class_change, by_clip.nearest_likeness)


@pytest.mark.parametrize(
    ("prompt", "trigger", "class_prompt", "word"),
    [
        ("a photo of sks dog", None, None, "sks"),
        ("a photo of ohwx, man", None, None, "ohwx"),
        ("a photo of TOK", None, None, "TOK"),
        ("a photo of r3x the dog", None, None, "r3x"),
        ("a photo of zzxq dog", None, None, "zzxq"),
        ("a photo of <s0> dog", None, None, "<s0>"),
        ("a photo of fluffy dog", None, "a photo of a dog", "fluffy"),
        ("a photo of the fluffy brown dog", None, "a photo of a dog", None),
        ("a photo of a dog", None, None, None),
        ("a photo of rex", "rex", None, "rex"),
        ("a photo of sks dog", "sks dog", None, "sks"),
        ("a photo of my dog", "my dog", None, "my dog"),
    ],
)
def test_the_subjects_word_is_found(prompt, trigger, class_prompt, word):
    assert subject_word(prompt, trigger, class_prompt) == word


def test_the_subjects_word_is_a_whole_word():
    assert names_subject("Photo of SKS.", "sks") and not names_subject("asks for flasks", "sks")
    assert without_subject("a photo of sks dog, SKS!", "sks") == "a photo of dog, !"
    assert without_subject("a <s0> dog", "<s0>") == "a dog"
