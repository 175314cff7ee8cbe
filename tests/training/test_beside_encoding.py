"""The trainer builds and compiles while another process encodes: with the right shapes, and without mixed lines."""

import pytest

from flux_db import console
from flux_db.training import build, run
from flux_db.training.prepare import prepare


@pytest.mark.parametrize(
    "changes",
    [{}, {"train_batch_size": 2, "train_text_encoder": True}, {"cache_latents": False}],
    ids=["plain", "CLIP trained", "pixels"],
)
def test_blank_batches_have_the_shapes_of_real_ones(world, cpu, tmp_path, changes):
    """Otherwise MindSpore would compile the step once more, at the first real batch."""
    config = world.config(tmp_path / "out", **changes)
    prepared = prepare(config, cpu)
    training = build.build(config, cpu, prepared.model, prepared.dataset)
    real = run.batch_source(config, training, prepared.cache, prepared)[0].given
    blank = run.batch_source(config, training, run._blank(config, prepared, training), prepared)[0].given
    assert [(x.shape, x.dtype) for x in blank] == [(x.shape, x.dtype) for x in real]


def test_what_is_said_meanwhile_comes_afterwards(capfd):
    console.hold_back()
    console.say("compiling")
    assert capfd.readouterr().err == ""
    console.release()
    console.say("training")
    assert capfd.readouterr().err == "compiling\ntraining\n"
