"""Samples shared out over ranks, pictures held out, and the validation loss."""

import json
import shutil
from dataclasses import dataclass, field
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from PIL import Image
from safetensors.numpy import save
from step_formula import inputs, loss_in_numpy, make, velocity

from flux_db.check.files import check_files
from flux_db.check.pictures import check_pictures
from flux_db.check.values import check_values
from flux_db.data import encode, encode_cache
from flux_db.data.dataset import Dataset, Example, read_dataset
from flux_db.data.pictures import Picture
from flux_db.demo.pictures import write_demo_pictures
from flux_db.errors import UserError
from flux_db.model.runtime import Runtime
from flux_db.output_folder import BEST_LORA
from flux_db.run import sample_files
from flux_db.run.metrics_log import MetricsLog
from flux_db.run.saved_state import Best, Waiting
from flux_db.settings.derived import validation_prompts
from flux_db.settings.schema import from_flat_dict
from flux_db.training.resume import Ground
from flux_db.training.sample_rounds import Rounds, Validator, is_due, steps_between
from flux_db.training.validation import Validation
from flux_db.training.validation_loss import LEVELS, FlowLoss, HeldOut


@dataclass
class Rank:
    """A rank that only remembers what it gave to the sum; `others` is what the other ranks gave."""

    rank: int
    world_size: int = 2
    others: np.ndarray | float = 0.0
    given: list = field(default_factory=list)

    share, has_turn = Runtime.share, Runtime.has_turn

    @property
    def is_main(self):
        return self.rank == 0

    def sum(self, values):
        self.given.append(np.array(values))
        return values + self.others


def config(output, **changes):
    values = {"pretrained_model_name_or_path": "m", "instance_data_dir": "d", "instance_prompt": "dog"}
    return from_flat_dict(values | {"output_dir": str(output), "report_to": ["none"], "resolution": 32} | changes)


# --- samples -----------------------------------------------------------------------------------------------------


class Painter:
    """Draws each request in a colour of its own; fails where told."""

    def __init__(self, fail=False):
        self.fail, self.sizes = fail, []

    def draw_pixels(self, requests, settings):
        for request in requests:
            if self.fail:
                raise RuntimeError("out of memory")
            self.sizes.append(settings.size)
            colour = np.array([request.prompt_embeds[0, 0], request.number, request.seed], np.float32)
            yield np.broadcast_to(colour[:, None, None] / 127.5 - 1, (3, 16, 16))


def validator(tmp_path, rank, painter, **changes):
    settings = config(
        tmp_path, validation_prompt=["a", "b"], num_validation_images=2, validation_seed=7, seed=99, **changes
    )
    cache = encode_cache.Cache(tmp_path / "cache", "t", "v", "no", 4)
    cache.folder.mkdir(exist_ok=True)
    for number, prompt in enumerate(("a", "b")):
        arrays = {"prompt_embeds": np.full((4, 2), 100 + number, np.float32), "pooled_prompt_embeds": np.zeros(2)}
        cache.write(cache.prompt_file(prompt), arrays)
    metrics_log = MetricsLog(settings, 10, 0, enabled=rank.is_main)
    return Validator(settings, rank, cache, painter, metrics_log)


def test_each_rank_draws_its_share_and_the_first_makes_the_sheet(tmp_path):
    painter = Painter()
    validator(tmp_path, Rank(1), painter, validation_size="64x48").run(5)
    folder = tmp_path / "samples" / "step-00005"
    assert sorted(p.name for p in folder.iterdir()) == ["01.png", "03.png"]
    assert not (tmp_path / "samples" / "grid.png").exists() and painter.sizes == [(64, 48)] * 2
    validator(tmp_path, Rank(0), Painter()).run(5)
    (round_,) = sample_files.read_rounds(tmp_path)
    assert [(p.prompt, p.number) for p in round_.pictures] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    colours = [Image.open(p.path).getpixel((0, 0)) for p in round_.pictures]
    assert colours == [(100, 0, 7), (100, 1, 7), (101, 0, 7), (101, 1, 7)]
    assert (tmp_path / "samples" / "grid.png").exists()


def test_shares_are_even_where_asked():
    assert [Rank(rank, 3).share(7) for rank in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [len(Rank(rank, 3).share(7, even=True)) for rank in range(3)] == [3, 3, 3]
    assert [len(Rank(rank, 4).share(1, even=True)) for rank in range(4)] == [1] * 4


def test_a_failure_on_one_rank_reaches_the_sum_and_the_report(tmp_path, capfd):
    failing = Rank(1)
    validator(tmp_path, failing, Painter(fail=True)).run(5)
    assert failing.given == [np.array([1.0])], "it does not leave the others waiting"
    validator(tmp_path, Rank(0, others=1.0), Painter()).run(5)
    text = capfd.readouterr().err
    assert "RuntimeError: out of memory; training goes on" in text and "failed on 1 of 2 ranks" in text
    assert '"event": "validation failed"' in (tmp_path / "metrics.jsonl").read_text()
    assert len(sample_files.read_rounds(tmp_path)[0].pictures) == 2, "what the others drew is kept"


def test_prompts_come_from_flags_and_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeff# comment\n\n  a dog  \nein Hündchen # im Park\na cat\n", encoding="utf-8")
    settings = config(tmp_path, validation_prompt=["a cat"], validation_prompts_file=str(file))
    assert validation_prompts(settings) == ("a cat", "a dog", "ein Hündchen # im Park")
    assert set(validation_prompts(settings)) <= set(encode.prompts_in_use(settings))
    file.write_text("# nothing\n")
    settings = config(tmp_path, validation_prompts_file=str(file))
    assert f"--validation_prompts_file {file}: has no prompt in it" in check_files(settings)
    file.write_bytes(b"\xff\xfe\x00")
    assert f"--validation_prompts_file {file}: not a text file in UTF-8" in check_files(settings)
    with pytest.raises(UserError, match=r"nowhere\.txt: No such file"):
        validation_prompts(config(tmp_path, validation_prompts_file="nowhere.txt"))


def test_validation_is_due_with_prompts_or_pictures(tmp_path):
    assert steps_between(config(tmp_path, validation_steps=5), 10, 2) is None
    assert steps_between(config(tmp_path, validation_steps=5, validation_share=0.1), 10, 2) == 5
    assert steps_between(config(tmp_path, validation_prompt=["a"], validation_epochs=3), 10, 4) == 8


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"validation_size": "64"}, "--validation_size 64: expects height x width in pixels, such as 768x512"),
        ({"validation_size": "64x40"}, "--validation_size 64x40: both sides must be multiples of 16, up to 4096"),
        ({"validation_size": "0x16"}, "--validation_size 0x16: both sides must be multiples of 16, up to 4096"),
        ({"validation_share": 1.0}, "--validation_share 1.0: must be 0 or more and below 1"),
        ({"keep_best": True}, "--keep_best: needs --validation_data_dir or --validation_share to measure what is best"),
        (
            {"validation_share": 0.1, "validation_data_dir": "x"},
            "--validation_share: not together with --validation_data_dir; give one of them",
        ),
        (
            {"validation_data_dir": "d"},
            "--validation_data_dir d: is the same folder as --instance_data_dir d, and each takes all pictures below"
            " it; choose folders apart",
        ),
    ],
)
def test_problems_of_validation(tmp_path, changes, problem):
    assert check_values(config(tmp_path, **changes)) == [problem]


# --- pictures held out -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    write_demo_pictures(folder, count=12, size=32)
    return folder


def names(samples):
    return {sample.picture.path.name for sample in samples}


def test_a_share_is_held_out_and_a_new_picture_moves_no_other(pictures, tmp_path):
    settings = config(tmp_path, instance_data_dir=str(pictures), validation_share=0.4)
    dataset, _ = read_dataset(settings)
    whole, _ = read_dataset(config(tmp_path, instance_data_dir=str(pictures)))
    held_out, trained = names(dataset.held_out), names(dataset.examples)
    assert held_out and trained and not held_out & trained and held_out | trained == names(whole.examples)
    assert dataset.fingerprint() != whole.fingerprint() and not whole.held_out
    assert all(sample.crop == (0.5, 0.5) for sample in dataset.held_out)
    fewer = tmp_path / "fewer"
    shutil.copytree(pictures, fewer)
    for name in (sorted(held_out)[0], sorted(trained)[0]):
        (fewer / name).unlink()
    smaller, _ = read_dataset(config(tmp_path, instance_data_dir=str(fewer), validation_share=0.4))
    assert names(smaller.held_out) < held_out and names(smaller.examples) < trained
    # a larger share holds out the same and more
    more, _ = read_dataset(config(tmp_path, instance_data_dir=str(pictures), validation_share=0.6))
    assert held_out <= names(more.held_out)


def test_a_small_share_holds_out_one_picture_and_no_share_holds_out_all(pictures, tmp_path):
    def settings(share, folder=pictures):
        return config(tmp_path / "out", instance_data_dir=str(folder), validation_share=share)

    assert check_pictures(settings(0.0001)) == []
    dataset, _ = read_dataset(settings(0.0001))
    assert len(dataset.held_out) == 1 and len(dataset.examples) == 11
    assert names(dataset.held_out) <= names(read_dataset(settings(0.4))[0].held_out)
    (problem,) = check_pictures(settings(0.99999))
    assert "holds out all 12 pictures" in problem
    (tmp_path / "one").mkdir()
    shutil.copy(pictures / "dog_00.png", tmp_path / "one")
    (problem,) = check_pictures(settings(0.0001, tmp_path / "one"))
    assert "needs at least two different pictures, one to hold out" in problem


def test_a_folder_of_its_own_leaves_the_training_alone(pictures, tmp_path):
    other = tmp_path / "other"
    write_demo_pictures(other, count=2, size=40)
    (other / "dog_00.txt").write_text("a caption")
    shutil.copy(pictures / "dog_05.png", other)
    plain, _ = read_dataset(config(tmp_path, instance_data_dir=str(pictures)))
    settings = config(tmp_path / "out", instance_data_dir=str(pictures), validation_data_dir=str(other))
    dataset, warnings = read_dataset(settings)
    assert dataset.examples == plain.examples and dataset.fingerprint() == plain.fingerprint()
    assert [sample.prompt for sample in dataset.held_out] == ["a caption", "dog", "dog"]
    assert "a caption" in dataset.prompts
    assert [w for w in warnings if "also trained on" in w] == [f"{other}/dog_05.png: held out, but also trained on"]
    (other / "dog_01.png").write_bytes(b"broken")
    assert check_pictures(settings)[0].startswith(f"--validation_data_dir: {other}/dog_01.png: not a JPEG")


# --- the loss ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts(cpu, world, tmp_path_factory):
    """A transformer with a LoRA that counts, dropout in it, and a cache with two held-out pictures."""
    folder = tmp_path_factory.mktemp("loss")
    transformer, settings, _, _ = make(cpu, world, folder, scheme="sigma_sqrt", flags={"lora_dropout": 0.5})
    transformer.set_train(True)
    cache = encode_cache.Cache(folder, "t", "v", "no", 8)
    samples = []
    for number in range(2):
        values = inputs(48, 32, rows=1, seed=number)
        picture = Picture(folder / f"{number}.png", None, (32, 32), f"{number + 1:064x}")
        samples.append(Example(picture=picture, prompt=f"prompt {number}", crop=(0.5, 0.5), size=(32, 32)))
        cache.write(cache.picture_file(samples[-1], False), {"moments": values["pictures"][0]})
        arrays = {"prompt_embeds": values["prompt_embeds"][0], "pooled_prompt_embeds": values["pooled"][0]}
        cache.write(cache.prompt_file(f"prompt {number}"), arrays)
    dataset = Dataset(examples=(), held_out=tuple(samples))
    return folder, transformer, settings, cache, dataset, FlowLoss(transformer, settings)


def held_out(parts, rank, **changes):
    folder, transformer, settings, cache, dataset, loss = parts
    made = HeldOut(config(folder, **changes), rank, cache, dataset, transformer, settings)
    made.loss = loss  # compiled once for all tests
    return made


def test_the_validation_loss_is_the_formula_without_weights_and_dropout(parts):
    _, transformer, settings, _, _, loss = parts
    values = {**inputs(48, 32, rows=1), "eps": np.zeros((1, 16, 4, 4), np.float32)}
    transformer.set_train(False)
    answer = velocity(transformer, settings, values)
    arrays = [values[name] for name in ("pictures", "noise", "index", "prompt_embeds", "pooled")]
    measured = loss(*(Tensor(array) for array in arrays)).asnumpy()
    transformer.set_train(True)
    assert measured.dtype == np.float32 and measured.shape == (1,)
    expected = loss_in_numpy(settings, values, answer, lambda sigma: np.ones_like(sigma))
    assert measured.mean() == pytest.approx(expected, rel=1e-6)


def test_ranks_share_the_work_and_measure_the_same(parts):
    whole = held_out(parts, Rank(0, world_size=1))
    names_before = [p.name for p in whole.transformer.get_parameters()]
    loss = whole.measure()
    assert whole.measure() == loss, "nothing random"
    assert whole.transformer.training and [p.name for p in whole.transformer.get_parameters()] == names_before
    for sharded in (False, True):
        ranks = [Rank(rank, 3) for rank in range(3)]
        for rank in ranks:
            held_out(parts, rank, shard_base=sharded).measure()
        given = np.stack([rank.given[0] for rank in ranks])
        assert given.shape == (3, 2 * LEVELS) and ((given != 0).sum(0) == 1).all(), "each counts once"
        assert given.sum(0).astype(np.float64).mean() == loss
    assert held_out(parts, Rank(0, world_size=1), validation_seed=7).measure() != loss
    assert held_out(parts, Rank(0), validation_seed=7).fingerprint != whole.fingerprint


def test_it_follows_the_weights(parts):
    from flux_db.model import adapter

    measure = held_out(parts, Rank(0, world_size=1))
    loss = measure.measure()
    weights = {
        f"transformer.{n}.weight": p.asnumpy().copy() for n, p in adapter.parameters(measure.transformer).items()
    }
    adapter.load_state_dict(measure.transformer, {name: 0.5 * value for name, value in weights.items()})
    assert measure.measure() != loss
    adapter.load_state_dict(measure.transformer, weights)
    assert measure.measure() == loss


def recalled(tmp_path, saved, row=None, **changes):
    """The best that a run knows when it goes on from a checkpoint, at step 4, with this line of its round there."""
    settings = config(tmp_path, **{"keep_best": True} | changes)

    def write_lora(name, kept_for):
        (tmp_path / name).write_bytes(best_file(4))

    held_out = SimpleNamespace(fingerprint="x")
    rounds = Rounds(every=1, score_every=None, total_steps=10)
    validation = Validation(settings, Rank(0), None, None, held_out, write_lora, rounds=rounds)
    validation.recall_best(saved, Ground(None, row))
    return validation.best


WAITED = {"waiting": Waiting(), "config": {"keep_best": "loss"}}


def best_file(step):
    return save({"a": np.zeros(1)}, {"steps": str(step)})


def line(step, best=True, pictures="x"):
    return {"step": step, "event": "validation", "validation_loss": 1 / step, "best": best, "pictures": pictures}


def test_the_best_survives_a_resume_only_with_its_lora(tmp_path):
    saved = SimpleNamespace(best=Best(2, 0.5, "x"), knows_best=True, **WAITED)
    assert recalled(tmp_path, saved, keep_best=False) == saved.best
    assert recalled(tmp_path, saved) is None, "its LoRA is to be kept, and gone"
    for step, best in ((2, saved.best), (6, None)):
        (tmp_path / BEST_LORA).write_bytes(best_file(step))
        assert recalled(tmp_path, saved) == best
    assert recalled(tmp_path, SimpleNamespace(best=Best(2, 0.5, "other pictures"), knows_best=True, **WAITED)) is None
    assert recalled(tmp_path, None) is None


def test_the_best_of_the_start_steps_own_round_is_written_again(tmp_path):
    """The checkpoint was saved before that round, so its LoRA is the checkpoint's weights."""
    saved = SimpleNamespace(best=Best(2, 0.5, "x"), knows_best=True, **WAITED)
    (tmp_path / BEST_LORA).write_bytes(best_file(2))
    assert recalled(tmp_path, saved, line(4, best=False)) == saved.best
    assert recalled(tmp_path, saved, line(4)) == Best(4, 0.25, "x")
    assert (tmp_path / BEST_LORA).read_bytes() == best_file(4)


def test_a_checkpoint_of_an_older_version_has_its_best_in_the_metrics(tmp_path):
    rows = [line(2), line(3, best=False), {"step": 3, "loss": 1.0}, line(4) | {"validation_loss": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / BEST_LORA).write_bytes(best_file(2))
    assert recalled(tmp_path, SimpleNamespace(best=None, knows_best=False, **WAITED)) == Best(2, 0.5, "x")


def test_rounds_are_due_at_both_ends_and_between():
    assert [step for step in range(12) if is_due(step, 4, 10)] == [0, 4, 8, 10]
    assert not any(is_due(step, None, 10) for step in range(12))


def test_a_failure_is_nan_on_every_rank_and_training_goes_on(parts, capfd):
    rank = Rank(1)
    broken = held_out(parts, rank)
    broken.loss = lambda *_: 1 / 0
    assert np.isnan(broken.measure()) and np.isnan(rank.given[0]).all()
    assert "no validation loss: ZeroDivisionError" in capfd.readouterr().err
    assert broken.transformer.training and ms.get_context("mode") == ms.GRAPH_MODE
