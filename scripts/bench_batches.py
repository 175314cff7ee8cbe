#!/usr/bin/env python
"""Host time of a micro-batch with the shapes of FLUX.1-dev: what a device would wait for if nothing were prefetched.

    python scripts/bench_batches.py

Embeddings of 512 x 4096, latents of 1024 px, batch 4; with one prompt for all pictures, and with a caption for each.
Every line once with the encodings in memory, and once read from disk for every row; medians. The last column is what
really holds a device up: the trainer prepares batches ahead in a thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flux_db.data.batches import BatchSource, prefetch  # noqa: E402  a script finds its package beside it
from flux_db.data.dataset import Dataset, Example  # noqa: E402
from flux_db.data.encode_cache import ArrayMemory, Cache  # noqa: E402
from flux_db.data.pictures import Picture  # noqa: E402
from flux_db.settings.schema import from_flat_dict  # noqa: E402
from flux_db.size import Size  # noqa: E402
from flux_db.stream import BatchLayout  # noqa: E402

# Seconds; quicker than any step of FLUX.1-dev.
STEP = 0.2
PIXELS, LATENT, TOKENS, T5_WIDTH, CLIP_WIDTH = 1024, (16, 128, 128), 512, 4096, 768


def make(folder: Path, pictures: int, *, captions: bool, memory: int, batch: int) -> BatchSource:
    """A source over made-up encodings."""
    cache = Cache(folder, "t", "v", "bf16", TOKENS, memory=ArrayMemory(memory))
    rng = np.random.default_rng(0)
    examples = []
    for number in range(pictures):
        prompt = f"caption {number}" if captions else "a photo of sks dog"
        picture = Picture(folder / f"{number}.png", None, Size.square(PIXELS), f"{number:064x}")
        examples.append(Example(picture=picture, prompt=prompt, crop=(0.5, 0.5), size=Size.square(PIXELS)))
        moments = rng.standard_normal((2 * LATENT[0], *LATENT[1:]), np.float32)
        cache.write(cache.picture_file(examples[-1], False), {"moments": moments})
        if not cache.prompt_file(prompt).exists():
            embeds = rng.standard_normal((TOKENS, T5_WIDTH), np.float32)
            pooled = rng.standard_normal(CLIP_WIDTH, np.float32)
            cache.write(cache.prompt_file(prompt), {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled})
    config = from_flat_dict(
        {
            "pretrained_model_name_or_path": "x",
            "instance_data_dir": "y",
            "instance_prompt": "a photo of sks dog",
            "resolution": PIXELS,
        }
    )
    return BatchSource(
        config=config,
        dataset=Dataset(examples=tuple(examples)),
        cache=cache,
        layout=BatchLayout(batch=batch),
        latent_shape=LATENT,
        learning_rates=np.ones(10_000, np.float32),
        sigmas=np.linspace(1.0, 0.001, 1000),
    )


def milliseconds(source: BatchSource, count: int) -> list[float]:
    for i in range(pictures_in(source)):  # everything was seen once
        source[i]
    times = []
    for i in range(count):
        start = time.perf_counter()
        source[i]
        times.append(1000 * (time.perf_counter() - start))
    return times


def waits(source: BatchSource, count: int, step: float) -> list[float]:
    """How long the loop waits for a batch, in ms, if a step takes so many seconds and one thread prepares ahead."""
    times, batches = [], prefetch(source, 1)
    for _ in range(count):
        start = time.perf_counter()
        next(batches)
        times.append(1000 * (time.perf_counter() - start))
        time.sleep(step)
    return times[1:]


def pictures_in(source: BatchSource) -> int:
    return -(-len(source.dataset.examples) // source.layout.batch)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="default: 4")
    parser.add_argument("--pictures", type=int, default=20, help="default: 20")
    parser.add_argument("--count", type=int, default=30, help="micro-batches to time (default: 30)")
    arguments = parser.parse_args()
    print(f"| Prompts | Encodings | ms of a micro-batch of {arguments.batch} | ms that the loop waits |")
    print("|---|---|---|---|")
    for captions in (False, True):
        for memory, label in ((0, "read from disk"), (8 * 2**30, "in memory")):
            with tempfile.TemporaryDirectory() as name:
                source = make(Path(name), arguments.pictures, captions=captions, memory=memory, batch=arguments.batch)
                times = milliseconds(source, arguments.count)
                waiting = waits(source, 10, STEP)
            prompts = "one for each picture" if captions else "one for all"
            print(
                f"| {prompts} | {label} | {statistics.median(times):.1f} | {statistics.median(waiting):.2f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
