"""Sizes by the pictures' shapes, and an order of samples in which every batch is of one size."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from flux_db import stream
from flux_db.data import buckets
from flux_db.data.draw_order import DrawOrder

# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resolution", [32, 64, 512, 768, 1024])
def test_candidates_are_as_large_as_can_be_within_the_area(resolution):
    sizes = buckets.candidates(resolution)
    assert (resolution, resolution) in sizes and {(w, h) for h, w in sizes} == set(sizes)
    for height, width in sizes:
        assert height % 16 == 0 and width % 16 == 0 and height * width <= resolution**2
        assert (height + 16) * width > resolution**2
        assert max(height, width) <= 4 * min(height, width)
        assert resolution < 512 or height * width > 0.93 * resolution**2


def best_by_trying(resolution, pictures, most):
    """The least cost, over every choice there is."""
    sizes = buckets.candidates(resolution)
    costs = []
    for count in range(1, most + 1):
        for chosen in itertools.combinations(sizes, count):
            total = sum(min(abs(buckets.shape_of(p) - buckets.shape_of(b)) for b in chosen) for p in pictures)
            costs.append(total + buckets.LEAST_GAIN * len(pictures) * count)
    return min(costs)


@pytest.mark.parametrize("seed", range(5))
def test_auto_finds_the_best_choice(seed):
    rng = np.random.default_rng(seed)
    pictures = [tuple(int(side) for side in rng.integers(200, 1500, 2)) for _ in range(int(rng.integers(1, 12)))]
    for most in (1, 2, 3):
        chosen = buckets.choose(128, pictures, most)
        assert len(chosen) <= most
        distance = sum(abs(buckets.shape_of(p) - buckets.shape_of(buckets.nearest(p, chosen))) for p in pictures)
        cost = distance + buckets.LEAST_GAIN * len(pictures) * len(chosen)
        assert cost == pytest.approx(best_by_trying(128, pictures, most), abs=1e-6)
        assert {buckets.nearest(p, chosen) for p in pictures} == set(chosen)


def test_auto_on_what_cameras_give():
    upright, across, square = (4000, 3000), (3000, 4000), (1000, 1000)
    assert buckets.choose(512, [upright] * 5 + [across] * 4, 5) == [(432, 592), (592, 432)]
    assert buckets.choose(512, [square] * 3, 5) == [(512, 512)]
    assert buckets.choose(512, [upright, across, square], 2) in ([(432, 592), (512, 512)], [(512, 512), (592, 432)])
    # one odd picture in 200 is not worth a graph
    assert buckets.choose(512, [square] * 200 + [(1000, 1200)], 5) == [(512, 512)]
    assert buckets.choose(512, [(100, 9000)], 5) == [(256, 1024)]


def test_nearest_is_by_ratio_and_a_tie_goes_to_the_first():
    sizes = [(512, 768), (768, 512)]
    assert buckets.nearest((100, 101), sizes) == (512, 768) and buckets.nearest((101, 100), sizes) == (768, 512)
    assert buckets.nearest((100, 100), sizes) == (512, 768)


# --- the order -------------------------------------------------------------------------------------------------------


def make(sizes, batch, seed=3):
    numbers = iter(range(sum(sizes)))
    return DrawOrder(seed=seed, global_batch=batch, groups=tuple(tuple(itertools.islice(numbers, n)) for n in sizes))


def epochs_of(order, count):
    """The samples of each epoch, batch by batch."""
    return [
        [
            [order.item(step * order.global_batch + place) for place in range(order.global_batch)]
            for step in range(order.steps(epoch), order.steps(epoch + 1))
        ]
        for epoch in range(count)
    ]


@pytest.mark.parametrize("sizes", [(5, 7), (4, 8, 12), (9, 5, 11, 6), (13, 4)])
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_every_picture_is_seen_equally_often(sizes, batch):
    order = make(sizes, batch)
    total = Counter()
    for number, batches in enumerate(epochs_of(order, 9), start=1):
        drawn = Counter(item for row in batches for item in row)
        for group in order.groups:
            seen = [drawn[item] for item in group]
            assert max(seen) - min(seen) <= 1  # in this epoch, within a size
        assert set(drawn.values()) <= {1, 2}  # and over all: none, one or two
        assert all(any(set(row) <= set(group) for group in order.groups) for row in batches)  # one size in a batch
        total += drawn
        # since the start, over all pictures: as often as there were epochs, or once more
        assert {total[item] for group in order.groups for item in group} <= {number, number + 1}
        if batch == 1 or all(size % batch == 0 for size in sizes):
            assert set(drawn.values()) == {1} and len(drawn) == sum(sizes)


def test_a_size_with_fewer_pictures_than_a_batch_is_not_preferred_in_the_long_run():
    order = make((1, 6), 4)
    total = Counter(item for batches in epochs_of(order, 40) for row in batches for item in row)
    assert set(total.values()) == {40}


def test_the_order_changes_from_epoch_to_epoch_and_with_the_seed():
    first, second, third = epochs_of(make((8, 8), 2), 3)
    assert first != second != third
    assert sorted(map(sorted, first)) != sorted(map(sorted, second)), "batches hold other pictures"
    assert epochs_of(make((8, 8), 2, seed=4), 1)[0] != first
    groups = [sum(item < 8 for item in row) > 0 for row in first]
    assert groups != sorted(groups) and groups != sorted(groups, reverse=True), "sizes are mixed"


def test_a_batch_does_not_hold_a_picture_twice_if_there_are_enough():
    order = make((8, 12), 4)
    assert all(len(set(row)) == 4 for batches in epochs_of(order, 6) for row in batches)


@pytest.mark.parametrize("sizes", [(8, 12), (1, 6), (5, 7, 3)])
def test_how_often_each_is_drawn_is_counted_without_drawing(sizes):
    order = make(sizes, 4)
    drawn = np.zeros(sum(sizes), int)
    for step in range(40):
        assert order.counts(step).tolist() == drawn.tolist()
        for position in range(step * 4, step * 4 + 4):
            drawn[order.item(position)] += 1
    assert order.counts(10**7).sum() == 4 * 10**7


def test_one_size_is_the_plain_stream():
    order = make((7,), 4)
    assert [order.item(k) for k in range(50)] == [stream.item(3, k, 7) for k in range(50)]
    assert [order.steps(n) for n in (1, 2, 4)] == [2, 4, 7]


@pytest.mark.parametrize(("sizes", "batch"), [((5, 7), 3), ((1, 2), 8), ((3, 40), 1)])
def test_epochs_and_steps_agree(sizes, batch):
    order = make(sizes, batch)
    for step in range(60):
        assert order.steps(order.epoch(step)) <= step < order.steps(order.epoch(step) + 1)
    for epochs in (1, 10, 100):
        assert order.steps(epochs) == sum(math.ceil(epochs * n / batch) for n in sizes)
