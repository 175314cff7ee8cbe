"""Sizes to train at: a few of about the same area and of different shape, so that less of each picture is cut away.

A picture's shape is the logarithm of height / width: 0 is square.
"""

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from flux_db.settings.raw_values import cut
from flux_db.size import PIXELS_PER_TOKEN, Size

AUTO = "auto"

# Of the sizes of a user so many are named with what is wrong.
MOST_NAMED = 20

# What is longer than this is cropped.
LARGEST_RATIO = 4

# A bucket more means a graph more to compile: it must spare this share of the pictures from being cut away.
LEAST_GAIN = 0.01


def shape_of(size: Size) -> float:
    height, width = size
    return math.log(height / width)


def nearest(size: Size, buckets: Sequence[Size]) -> Size:
    """The bucket whose shape is nearest to that of a picture of this size; of two, the first."""
    # rounded, because a tie must not be decided by the last bit of a logarithm
    return min(buckets, key=lambda bucket: round(abs(shape_of(bucket) - shape_of(size)), 9))


def parse(text: str) -> list[Size]:
    """The sizes of "512,768;768,512"; a ValueError says what is wrong."""
    sizes = []
    for part in text.strip().strip(";").split(";"):
        match = re.fullmatch(r"\s*(\d{1,9})\s*,\s*(\d{1,9})\s*", part)
        if match is None:
            raise ValueError(
                f'"{cut(part.strip())}" is not height,width; write {AUTO} alone, or sizes such as "512,768;768,512"'
            )
        sizes.append(Size(int(match[1]), int(match[2])))
    return sizes


def problems(text: str, resolution: int, most: int) -> list[str]:
    """What is wrong with the sizes that a user gave."""
    if text.strip() == AUTO:
        return []
    try:
        sizes = parse(text)
    except ValueError as error:
        return [str(error)]
    found = [f"{h},{w} is given twice" for (h, w), count in Counter(sizes).items() if count > 1]
    for height, width in sizes:
        if min(height, width) <= 0 or height % PIXELS_PER_TOKEN or width % PIXELS_PER_TOKEN:
            found.append(f"{height},{width}: both sides must be multiples of {PIXELS_PER_TOKEN}")
        elif not resolution**2 / 2 <= height * width <= resolution**2 * 2:
            side = round(math.sqrt(height * width) / PIXELS_PER_TOKEN) * PIXELS_PER_TOKEN
            found.append(f"{height},{width} has the area of about {side} x {side}; give --resolution {side} with it")
    if len(found) > MOST_NAMED:
        found[MOST_NAMED:] = [f"{len(found) - MOST_NAMED} more sizes like these"]
    if len(sizes) > most:
        found.append(f"{len(sizes)} sizes, each a graph to compile; name fewer, or allow them by --max_buckets")
    return found


def candidates(resolution: int) -> list[Size]:
    """Every size that auto may choose, from wide to tall: as large as can be within resolution^2 pixels."""
    area, step = resolution**2, PIXELS_PER_TOKEN
    sizes = []
    for height in range(step, LARGEST_RATIO * resolution + 1, step):
        width = area // height // step * step
        is_largest = (height + step) * width > area
        if is_largest and max(height, width) <= LARGEST_RATIO * min(height, width):
            sizes.append(Size(height, width))
    return sizes


def choose(resolution: int, pictures: Sequence[Size], most: int) -> list[Size]:
    """At most `most` of the candidates, so that the pictures' shapes are nearest to them in sum.

    The sum over sorted shapes splits at the buckets, so the best choice is found exactly: `best[j]` is the least
    cost of all pictures up to candidate j, if j is chosen, with the choice that has it.
    """
    sizes = candidates(resolution)
    bucket_shapes = [shape_of(size) for size in sizes]
    shapes = sorted(shape_of(picture) for picture in pictures)
    sums = [0.0, *accumulate(shapes)]

    def cost(start: float, end: float, bucket: float) -> float:
        """Summed distance to `bucket` of the shapes above `start` up to `end`, all on one side of it."""
        first, last = bisect_right(shapes, start), bisect_right(shapes, end)
        return abs(sums[last] - sums[first] - (last - first) * bucket)

    def between(i: int, j: int) -> float:
        middle = (bucket_shapes[i] + bucket_shapes[j]) / 2
        return cost(bucket_shapes[i], middle, bucket_shapes[i]) + cost(middle, bucket_shapes[j], bucket_shapes[j])

    price = LEAST_GAIN * len(shapes)
    best = [(price + cost(-math.inf, bucket, bucket), (j,)) for j, bucket in enumerate(bucket_shapes)]
    rounds = [best]
    for _ in range(min(most, len(set(shapes))) - 1):  # a bucket for each shape is the most that can help
        best = [
            min(((best[i][0] + price + between(i, j), (*best[i][1], j)) for i in range(j)), default=(math.inf, (j,)))
            for j in range(len(bucket_shapes))
        ]
        rounds.append(best)
    ends = [
        (round(value + cost(bucket_shapes[chosen[-1]], math.inf, bucket_shapes[chosen[-1]]), 9), len(chosen), chosen)
        for row in rounds
        for value, chosen in row
    ]
    return [sizes[j] for j in min(ends)[2]]
