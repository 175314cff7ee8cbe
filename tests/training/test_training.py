"""Whole runs on the tiny model: what a user would notice."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load, load_file
from world import lora_bytes, metrics, train, without_time

from flux_db.data import encode
from flux_db.data.batches import BatchSource, prefetch
from flux_db.data.dataset import read_dataset
from flux_db.data.encode_cache import open_cache
from flux_db.errors import UserError
from flux_db.model import model_folder
from flux_db.report import run_page
from flux_db.run import saved_state
from flux_db.run.saved_state import lora_steps
from flux_db.settings.schema import from_flat_dict, to_flat_dict
from flux_db.stream import BatchLayout
from flux_db.training.prepare import prepare


@pytest.fixture(scope="module")
def long_run(cpu, world, tmp_path_factory):
    """8 steps of 2 x 2 accumulated, saved in the middle: 3 pictures, so the middle of an epoch. With dropout."""
    output = tmp_path_factory.mktemp("run")
    config = world.config(
        output, max_train_steps=8, train_batch_size=2, gradient_accumulation_steps=2, checkpointing_steps=3,
        lora_dropout=0.1, random_flip=True, lr_scheduler="cosine", lr_warmup_steps=2, center_crop=True,
        validation_inference_steps=2, validation_size="32x48",  # no samples, but the metadata have them
    )  # fmt: skip
    assert train(config) == 0
    return config


def resumed(config, output, **changes):
    return from_flat_dict(to_flat_dict(config) | {"output_dir": str(output)} | changes)


def output_of(config):
    return Path(config.output.output_dir)


def test_what_a_run_leaves_behind(long_run, world):
    output = output_of(long_run)
    rows = metrics(output)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[0]["lr"] == 0 and rows[2]["lr"] == pytest.approx(1e-3, rel=1e-6) and rows[-1]["lr"] < 2e-4
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 and row["skipped"] == 0 for row in rows)
    assert rows[2]["epoch"] == 4.0
    assert {p.name for p in output.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-6", "checkpoint-8"}
    assert saved_state.read(output / "checkpoint-6").progress.step == 6
    tensors = load_file(output / "pytorch_lora_weights.safetensors")
    assert all(name.startswith("transformer.") and np.isfinite(v).all() for name, v in tensors.items())
    assert any(np.abs(v).max() > 0 for name, v in tensors.items() if "lora_B" in name)
    # a checkpoint's LoRA is the same kind of file
    assert load_file(output / "checkpoint-3/pytorch_lora_weights.safetensors").keys() == tensors.keys()
    assert (output / "config.yaml").exists()
    assert str(world.folder) not in lora_bytes(output).decode("latin1")


def test_the_report_is_renewed_while_the_run_goes_on(long_run, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(run_page, "REPORT_SECONDS", 0.01)
    monkeypatch.setattr(run_page, "REPORT_SHARE", 1e9)
    monkeypatch.setattr(run_page, "write_file", lambda path, data: seen.append(data.decode()))
    assert train(resumed(long_run, tmp_path / "out", max_train_steps=4)) == 0
    steps = [int(re.search(r"<dt>Steps</dt><dd>(\d+)", page)[1]) for page in seen]
    reloads = ['http-equiv="refresh"' in page for page in seen]
    assert steps[0] == 0 and steps[-1] == 4 and {1, 2} & {*steps} and steps == sorted(steps)
    assert all(reloads[:-1]) and not reloads[-1]


def test_a_resumed_run_and_a_validated_run_end_in_the_same_bytes(long_run, world, tmp_path):
    """One resume shows two things: it is exact, and samples, validation loss and trackers change nothing."""
    output = output_of(long_run)
    again = tmp_path / "again"
    shutil.copytree(output, again)
    for path in ("checkpoint-6", "checkpoint-8"):
        shutil.rmtree(again / path)
    (again / "pytorch_lora_weights.safetensors").unlink()
    (tmp_path / "prompts.txt").write_text("\n# comment\na photo of sks dog\n")
    shutil.copytree(world.pictures, tmp_path / "held")
    config = resumed(
        long_run, again, resume_from_checkpoint="latest", validation_prompts_file=str(tmp_path / "prompts.txt"),
        num_validation_images=2, validation_steps=3,
        validation_data_dir=str(tmp_path / "held"), keep_best=True, report_to=["tensorboard"],
    )  # fmt: skip
    assert train(config) == 0
    assert lora_bytes(again) == lora_bytes(output)
    rows = metrics(again)
    assert without_time([row for row in rows if "event" not in row]) == without_time(metrics(output))
    names = {str(p.relative_to(again / "samples")) for p in (again / "samples").rglob("*.png")}
    assert names == {"grid.png", *(f"step-{s:05d}/{n:02d}.png" for s in (3, 6, 8) for n in range(2))}
    assert Image.open(again / "samples/step-00008/01.png").size == (48, 32)
    # the validation loss: at its steps, also that of the start, and the LoRA of the lowest kept
    events = [row for row in rows if "event" in row]
    assert [(row["step"], row["event"], row["samples"]) for row in events] == [(n, "validation", 2) for n in (3, 6, 8)]
    best = min(events, key=lambda row: row["validation_loss"])
    assert best["best"] and 0.1 < best["validation_loss"] < 10
    assert lora_steps(again / "best_lora.safetensors") == best["step"]
    kept = load_file(again / "best_lora.safetensors")
    at_best = load_file(again / f"checkpoint-{best['step']}/pytorch_lora_weights.safetensors")
    assert all(np.array_equal(kept[name], at_best[name]) for name in at_best)
    text = (again / "report.html").read_text(encoding="utf-8")
    assert "Validation loss" in text and text.count('class="round"') == 3 and "Training picture dog_00.png" in text
    assert list((again / "logs").iterdir())


def test_resume_refuses_what_changes_the_result(long_run, tmp_path):
    path = str(output_of(long_run) / "checkpoint-3")
    config = resumed(long_run, tmp_path, resume_from_checkpoint=path, rank=8, seed=7, guidance_scale=2.0)
    with pytest.raises(UserError) as caught:
        train(config)
    text = str(caught.value)
    assert all(name in text for name in ("rank", "seed", "guidance_scale", "--allow_changed"))


@pytest.fixture(scope="module")
def dealt(cpu, world, tmp_path_factory):
    """One global batch of 4 for 5 steps, dealt in three ways."""
    runs = {}
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        output = tmp_path_factory.mktemp(f"dealt{batch}")
        config = world.config(
            output, max_train_steps=5, train_batch_size=batch, gradient_accumulation_steps=accumulation,
            weighting_scheme="logit_normal",
        )  # fmt: skip
        assert train(config) == 0
        runs[batch] = (load(lora_bytes(output)), metrics(output))
    return runs


@pytest.mark.parametrize("batch", [2, 1])
def test_the_result_does_not_depend_on_how_a_batch_is_dealt(dealt, batch):
    (weights, rows), (other, other_rows) = dealt[4], dealt[batch]
    assert max(np.abs(weights[name] - other[name]).max() for name in weights) < 1e-5
    for row, other_row in zip(rows, other_rows, strict=True):
        assert other_row["loss"] == pytest.approx(row["loss"], rel=1e-5)
        assert other_row["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4)


def test_pixels_in_the_step_equal_cached_latents(cpu, world, tmp_path):
    """The VAE inside the step computes what the encode stage computed; with centre crops both see the same pixels."""
    losses = []
    for cached in (True, False):
        output = tmp_path / str(cached)
        config = world.config(output, max_train_steps=2, cache_latents=cached, center_crop=True, random_flip=True)
        assert train(config) == 0
        losses.append([row["loss"] for row in metrics(output)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_prior_preservation_draws_the_missing_class_pictures(cpu, world, tmp_path):
    classes = tmp_path / "class"
    shutil.copytree(world.pictures, classes)
    (classes / "dog_01.png").write_bytes(b"not a picture")
    settings = {
        "with_prior_preservation": True, "class_data_dir": str(classes), "class_prompt": "a photo of a dog",
        "num_class_images": 4, "sample_batch_size": 2, "validation_inference_steps": 2, "max_train_steps": 2,
        "mixed_precision": "fp16", "gradient_checkpointing": "blocks", "lora_alpha": 2.0,
        "validation_prompt": ["a photo of a dog"], "num_validation_images": 2,
    }  # fmt: skip
    output = tmp_path / "out"
    assert train(world.config(output, **settings, checkpointing_steps=1)) == 0
    assert sorted(p.name for p in classes.iterdir()) == [
        "class-00000.png", "class-00001.png", "dog_00.png", "dog_01.png.damaged", "dog_02.png",
    ]  # fmt: skip
    rows = [row for row in metrics(output) if "loss" in row]
    assert len(rows) == 2 and all(np.isfinite(row["loss"]) and row["loss_scale"] > 0 for row in rows)
    # before the first step the same prompt and seed draw other pictures than those that are trained on
    for number in range(2):
        drawn, sample = (
            np.asarray(Image.open(path), np.float32)
            for path in (classes / f"class-{number:05d}.png", output / f"samples/step-00000/{number:02d}.png")
        )
        assert np.abs(drawn - sample).mean() > 3
    # resumed in fp16 with its dynamic scale, and with pairs of samples: the same bytes
    again = tmp_path / "again"
    path = str(output / "checkpoint-1")
    assert train(world.config(again, **settings, checkpointing_steps=1, resume_from_checkpoint=path)) == 0
    assert lora_bytes(again) == lora_bytes(output)
    tensors = load(lora_bytes(output))
    assert {v.dtype for name, v in tensors.items() if "lora_" in name} == {np.dtype(np.float16)}
    assert {float(v) for name, v in tensors.items() if name.endswith(".alpha")} == {2.0}


# --- the encoded cache -------------------------------------------------------------------------------------------


def test_only_what_changed_is_encoded_again(cpu, world, tmp_path):
    pictures = tmp_path / "pictures"
    shutil.copytree(world.pictures, pictures)
    places = {"instance_data_dir": str(pictures), "encode_cache_dir": str(tmp_path / "cache")}
    config = world.config(tmp_path / "out", **places)

    def work(**changes):
        changed = world.config(tmp_path / "out", **places, **changes)
        cache = open_cache(changed, model_folder.locate(changed.model))
        return encode.missing(changed, cache, read_dataset(changed)[0])

    assert (len(work().prompts), len(work().pictures)) == (1, 3)
    _, cache, dataset, _ = prepare(config, cpu)
    assert not work()
    assert (work(instance_prompt="another").prompts, work(instance_prompt="another").pictures) == (("another",), ())
    assert len(work(resolution=48).pictures) == 3 and not work(resolution=48).prompts
    assert [flip for _, flip in work(random_flip=True).pictures] == [True] * 3
    assert work(max_sequence_length=24).prompts and not work(max_sequence_length=24).pictures
    assert not work(learning_rate=0.5, seed=42, rank=2)
    assert len(work(alpha_background="grey").pictures) == 3 and not work(alpha_background="#FFFFFF")
    trigger = {"instance_prompt": "a {trigger}", "validation_prompt": ["[trigger] sits"], "trigger_word": "sks"}
    assert work(**trigger).prompts == ("a sks", "sks sits")

    (pictures / "dog_01.png").write_bytes((pictures / "dog_00.png").read_bytes() + b"\0")
    assert [s.picture.path.name for s, _ in work().pictures] == ["dog_01.png"]

    file = cache.picture_file(dataset.examples[0], False)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert {s.picture.path.name for s, _ in work().pictures} == {"dog_00.png", "dog_01.png"}


def test_transparent_pictures_have_their_background_wherever_they_are_opened(cpu, world, tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    Image.new("RGBA", (32, 32), (0, 0, 0, 0)).save(pictures / "clear.png")
    Image.new("RGB", (32, 32), (51, 102, 204)).save(pictures / "solid.png")
    places = {"instance_data_dir": str(pictures), "encode_cache_dir": str(tmp_path / "cache"), "center_crop": True}
    config = world.config(tmp_path / "out", **places, alpha_background="#3366cc")
    cache = open_cache(config, world.model)
    dataset, _ = read_dataset(config)
    encode.encode(config, world.model, cache, replace(encode.missing(config, cache, dataset), prompts=()))
    clear, solid = (cache.read(cache.picture_file(sample, False))["moments"] for sample in dataset.examples)
    np.testing.assert_array_equal(clear, solid)

    config = world.config(tmp_path / "out", **places, alpha_background="#3366cc", cache_latents=False)
    batches = BatchSource(
        config=config, dataset=dataset, cache=cache, layout=BatchLayout(batch=1), latent_shape=(16, 4, 4),
        learning_rates=np.zeros(1, np.float32), sigmas=np.linspace(1.0, 0.001, 1000),
    )  # fmt: skip
    clear, solid = (batches._picture(sample, 0, 0)[0] for sample in dataset.examples)
    np.testing.assert_array_equal(clear, solid)
    np.testing.assert_allclose((clear[:, 0, 0] + 1) * 127.5, (51, 102, 204), atol=1e-4)


def test_a_second_run_loads_no_encoder(cpu, long_run, capfd):
    prepare(long_run, cpu)
    assert "no encoder is loaded" in capfd.readouterr().err


# --- batches -----------------------------------------------------------------------------------------------------


def source(config, cpu, **layout):
    _, cache, dataset, _ = prepare(config, cpu)
    return BatchSource(
        config=config, dataset=dataset, cache=cache, layout=BatchLayout(**layout), latent_shape=(16, 4, 4),
        learning_rates=np.linspace(0, 1, 6, dtype=np.float32), sigmas=np.linspace(1.0, 0.001, 1000),
    )  # fmt: skip


def test_batches_are_the_same_however_they_are_dealt_and_fetched(cpu, long_run):
    whole = source(long_run, cpu, batch=4)
    parts = [source(long_run, cpu, batch=1, accumulation=2, world_size=2, rank=rank) for rank in range(2)]
    for i in range(len(whole)):
        pieces = [parts[rank][2 * i + part] for part in range(2) for rank in range(2)]
        for column in range(7):
            joined = np.concatenate([piece[column] for piece in pieces])
            assert np.array_equal(joined, whole[i][column])
        assert [bool(piece[8]) for piece in pieces] == [False, False, True, True]
    for one, two in zip(prefetch(whole, 3), whole, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_every_sample_gets_noise_of_its_own(cpu, long_run):
    batches = source(long_run, cpu, batch=3)
    noises = np.concatenate([batches[i][2] for i in range(4)]).reshape(12, -1)
    correlation = np.corrcoef(
        np.concatenate([noises, np.concatenate([batches[i][1] for i in range(4)]).reshape(12, -1)])
    )
    assert np.abs(correlation - np.eye(24)).max() < 0.35
    assert abs(noises.mean()) < 0.05 and abs(noises.std() - 1) < 0.05
