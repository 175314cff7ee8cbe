"""Checkpoints survive: crashes at every file operation, kill -9, full disks, flipped bytes, second runs."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import program
import pytest

from flux_db import atomic
from flux_db.errors import UserError
from flux_db.run import checkpoint
from flux_db.run.checkpoint import DamagedCheckpoint, clean_leftovers, find_latest, load, prune, save
from flux_db.run.lock import OutputLock
from flux_db.run.status import read_status, write_status
from flux_db.settings.resume_rules import FREE, GLOBAL_BATCH, LENGTH, Change, changed_settings, refuse_changes
from flux_db.settings.schema import from_flat_dict, to_flat_dict


def some_files(seed=0, size=3000):
    return {
        "lora.safetensors": random.Random(seed).randbytes(size),
        "state.json": json.dumps({"seed": seed}).encode(),
        "empty.json": b"",
    }


def start(code, *args):
    """A Python process that runs the code; its first line of output says that it is ready."""
    words = [sys.executable, "-c", code, *map(str, args)]
    return program.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def flip(path, position, rng):
    data = bytearray(path.read_bytes())
    data[position] ^= rng.randrange(1, 256)
    path.write_bytes(data)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def checkpoints(output_dir):
    return [step for step, _ in checkpoint.numbered(output_dir)]


# ---- Files and folders, whole or not at all ----


def test_a_file_is_replaced(tmp_path):
    for data in (b"first", b"second"):
        atomic.write_file(tmp_path / "file", data)
        assert (tmp_path / "file").read_bytes() == data
    assert names(tmp_path) == ["file"]


def test_a_failed_file_leaves_the_old_one(tmp_path, monkeypatch):
    atomic.write_file(tmp_path / "file", b"old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "broken disk")))
    with pytest.raises(OSError, match="broken disk"):
        atomic.write_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_folder_with_subfolders(tmp_path):
    files = {"a.json": b"1", "below/b.json": b"2"}
    atomic.write_folder(tmp_path / "made" / "folder", files)
    assert {name: (tmp_path / "made" / "folder" / name).read_bytes() for name in files} == files
    assert names(tmp_path / "made") == ["folder"]


def test_a_folder_is_not_replaced_by_accident(tmp_path):
    atomic.write_folder(tmp_path / "folder", {"old": b"1"})
    with pytest.raises(OSError):
        atomic.write_folder(tmp_path / "folder", {"new": b"2"})
    assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == ["old"]


def test_everything_is_synced_before_the_rename(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(Path(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append("rename"), rename(path, to)))
    save(tmp_path, 5, some_files())
    renamed = events.index("rename")
    temp = events[0].parent
    assert set(events[:renamed]) == {temp, *(temp / name for name in [*some_files(), "manifest.json"])}
    assert events[renamed + 1 :] == [tmp_path]


# ---- Save and load ----


def test_what_is_saved_is_loaded(tmp_path):
    folder = save(tmp_path / "out", 7, some_files())
    assert folder == tmp_path / "out" / "checkpoint-7"
    assert load(folder) == checkpoint.Checkpoint(folder, 7, some_files())
    assert names(tmp_path / "out") == ["checkpoint-7"]


def test_a_checkpoint_moved_elsewhere_under_any_name_still_loads(tmp_path):
    moved = save(tmp_path, 7, some_files()).rename(tmp_path / "the good one")
    assert load(moved).step == 7


def test_a_step_saved_twice_holds_the_second(tmp_path):
    save(tmp_path, 5, some_files(0))
    save(tmp_path, 5, {"only.json": b"{}"})
    assert load(tmp_path / "checkpoint-5").files == {"only.json": b"{}"}
    assert names(tmp_path) == ["checkpoint-5"]


@pytest.mark.parametrize("what", ["foreign folder", "damaged manifest", "file", "link"])
def test_what_is_not_ours_is_kept_aside_by_save(tmp_path, what):
    target, elsewhere = tmp_path / "checkpoint-5", tmp_path / "elsewhere"
    if what == "file":
        target.write_text("mine")
    elif what == "link":
        save(elsewhere, 5, some_files(1)).rename(elsewhere / "real")
        target.symlink_to(elsewhere / "real")
    elif what == "damaged manifest":
        flip(save(tmp_path, 5, some_files(1)) / "manifest.json", 30, random.Random(0))
    else:
        target.mkdir()
        (target / "optimizer.bin").write_text("mine")
    for n in (1, 2):
        save(tmp_path, 5, some_files(n))
    kept = tmp_path / "checkpoint-5.kept-1"
    assert load(target).files == some_files(2)
    assert not target.is_symlink()
    assert names(tmp_path) == ["checkpoint-5", kept.name, *(["elsewhere"] if what == "link" else [])]
    if what == "file":
        assert kept.read_text() == "mine"
    elif what == "link":
        assert load(elsewhere / "real").files == some_files(1)
    else:
        assert len(names(kept)) == (4 if what == "damaged manifest" else 1)


def test_an_empty_folder_in_the_way_is_filled(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    save(tmp_path, 5, some_files())
    assert names(tmp_path) == ["checkpoint-5"]


@pytest.mark.parametrize("name", ["manifest.json", "../up", "a/b", "", ".."])
def test_a_file_name_that_cannot_be_kept_is_a_bug(tmp_path, name):
    with pytest.raises(ValueError):
        save(tmp_path, 1, {name: b""})
    assert names(tmp_path) == []


# ---- Damage ----


def test_200_random_flips_and_every_byte_of_the_manifest_are_noticed(tmp_path):
    rng = random.Random(0)
    folder = save(tmp_path, 5, some_files())
    sizes = {path: path.stat().st_size for path in folder.iterdir()}
    places = [(path, position) for path, size in sizes.items() for position in range(size)]
    manifest = [place for place in places if place[0].name == "manifest.json"]
    noticed = 0
    chosen = rng.sample(places, 200) + manifest
    for path, position in chosen:
        sound = path.read_bytes()
        flip(path, position, rng)
        with pytest.raises(DamagedCheckpoint, match=str(path)):
            load(folder)
        noticed += 1
        path.write_bytes(sound)
    assert noticed == len(chosen) > 200
    assert load(folder).files == some_files()


@pytest.mark.parametrize("name", ["lora.safetensors", "state.json", "manifest.json"])
def test_truncation_and_growth_at_any_length_are_noticed(tmp_path, name):
    path = save(tmp_path, 5, some_files()) / name
    sound = path.read_bytes()
    for data in [sound[:-1], sound[: len(sound) // 2], b"", sound + b"\0", sound + b"\n"]:
        path.write_bytes(data)
        with pytest.raises(DamagedCheckpoint, match=str(path)):
            load(path.parent)


def test_every_missing_file_is_named_and_an_extra_file_is_harmless(tmp_path):
    folder = save(tmp_path, 5, some_files())
    (folder / "notes.txt").write_text("mine")
    assert load(folder).files == some_files()
    for name in some_files():
        (folder / name).unlink()
    with pytest.raises(DamagedCheckpoint) as caught:
        load(folder)
    assert sorted(caught.value.problems) == sorted(f"{folder / name}: is missing" for name in some_files())


def resealed(**changes):
    def change(folder):
        path = folder / "manifest.json"
        path.write_bytes(checkpoint._seal({**json.loads(path.read_bytes()), **changes}))

    return change


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (shutil.rmtree, "checkpoint-5: there is no such folder"),
        (lambda folder: (shutil.rmtree(folder), folder.mkdir()), "checkpoint-5: is empty"),
        (lambda folder: (shutil.rmtree(folder), folder.write_text("")), "checkpoint-5: is not a folder"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json: is not JSON"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe\xff"), "manifest.json: is not JSON"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 10**5), "manifest.json: is not JSON"),
        (lambda folder: (folder / "manifest.json").write_text("[1]"), "manifest.json: is not the manifest"),
        (resealed(format="other"), "manifest.json: is not the manifest"),
        (resealed(schema=2, tool="flux_db 9.9"), r"is of schema 2, .* the version that wrote it \(flux_db 9.9\)"),
        (resealed(schema="1"), "is not what was written"),
        (resealed(step=6), "is of step 6, while the folder's name says 5"),
        (resealed(files={"../secret": {"size": 0, "sha256": ""}}), "is not what was written"),
        (resealed(files=[]), "is not what was written"),
        (lambda folder: ((folder / "state.json").unlink(), (folder / "state.json").mkdir()), "state.json: cannot be"),
    ],
)
def test_each_kind_of_damage_is_named_and_latest_falls_back(tmp_path, damage, problem):
    save(tmp_path, 4, some_files(4))
    damage(save(tmp_path, 5, some_files(5)))
    with pytest.raises(DamagedCheckpoint, match=problem):
        load(tmp_path / "checkpoint-5")
    latest, skipped = find_latest(tmp_path)
    assert latest.step == 4 and latest.files == some_files(4)
    assert len(skipped) == (damage is not shutil.rmtree)
    assert all(line.startswith("skipped checkpoint-5: ") for line in skipped)


def test_latest_goes_by_number_not_by_name_or_time(tmp_path):
    for step in (100, 20, 9):
        save(tmp_path, step, some_files(step))
    for foreign in ("checkpoint-007", "checkpoint-", "checkpoint-200.kept-1", "checkpoint-1e9", "xcheckpoint-300"):
        (tmp_path / foreign).mkdir()
    assert find_latest(tmp_path) == (load(tmp_path / "checkpoint-100"), [])
    for step in (100, 20):
        (tmp_path / f"checkpoint-{step}" / "lora.safetensors").unlink()
    latest, skipped = find_latest(tmp_path)
    assert latest.step == 9
    assert [line.split(":")[0] for line in skipped] == ["skipped checkpoint-100", "skipped checkpoint-20"]


def test_nothing_to_go_on_from(tmp_path):
    assert find_latest(tmp_path) == (None, [])
    assert find_latest(tmp_path / "nowhere") == (None, [])


# ---- Crashes ----


def crash_at(event, work):
    """Run the work in a forked process that dies at its n-th file operation. True if it got that far."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(name, args):
            nonlocal seen
            if name in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
                seen += 1
                if seen == event:
                    os._exit(9)

        sys.addaudithook(count)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("existing", [[3, 4], [3, 4, 5]])
def test_a_crash_at_any_file_operation_of_save_and_prune_costs_nothing(tmp_path, existing):
    def work():
        save(out, 5, some_files(50))
        prune(out, 2)

    crashes, renamed = 0, 0
    for event in range(1, 200):
        out = tmp_path / str(event)
        for step in existing:
            save(out, step, some_files(step))
        crashed = crash_at(event, work)
        renamed += 5 in existing and 5 not in checkpoints(out)
        assert all(load(folder) for _, folder in checkpoint.numbered(out))
        assert find_latest(out)[0].step >= 4
        clean_leftovers(out)
        latest, skipped = find_latest(out)
        assert skipped == [] and latest.step >= existing[-1]
        assert latest.files in (some_files(latest.step), some_files(50))
        assert not [name for name in names(out) if name.startswith(".tmp-")]
        if not crashed:
            break
        crashes += 1
    assert 15 < crashes < 199
    assert checkpoints(out) == [4, 5] and latest.files == some_files(50)
    # The moment between the two renames of a replacement was among them.
    assert renamed == (1 if 5 in existing else 0)


WRITER = """
import random, sys
from flux_db.run import checkpoint
out, same = sys.argv[1], sys.argv[2] == "same"
checkpoint.clean_leftovers(out)
latest, skipped = checkpoint.find_latest(out)
assert not skipped, skipped
step = latest.step if latest else 0
while True:
    step += 0 if same else 1
    checkpoint.save(out, step, {"a": random.Random(step).randbytes(300_000), "b": b"x" * step})
    print(step, flush=True)
    checkpoint.prune(out, 2)
"""


@pytest.mark.parametrize("steps", ["rising", "same"])
def test_kill_9_while_saving_loses_nothing(tmp_path, steps):
    rng = random.Random(1)
    for _ in range(10):
        process = start(WRITER, tmp_path, steps)
        process.stdout.readline()
        time.sleep(rng.uniform(0, 0.06))
        process.kill()
        printed, errors = process.communicate(timeout=60)
        assert errors == ""
        lines = printed.split("\n")[:-1]
        clean_leftovers(tmp_path)
        latest, skipped = find_latest(tmp_path)
        assert skipped == []
        assert latest.step >= (int(lines[-1]) if lines else 0)
        assert latest.files == {"a": random.Random(latest.step).randbytes(300_000), "b": b"x" * latest.step}
        assert not [name for name in names(tmp_path) if name.startswith(".tmp-")]
    # how many were not pruned in time depends on the machine's load; none of them stands in the way
    prune(tmp_path, 2)
    assert len(checkpoints(tmp_path)) == (2 if steps == "rising" else 1)


FULL_DISK = """
import resource, sys
from flux_db.run import checkpoint
for step in (5, 6):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        checkpoint.save(sys.argv[1], step, {"small": b"1", "large": b"x" * 200_000})
    except OSError as error:
        print("OSError", error.errno)
"""


def test_a_full_disk_leaves_the_earlier_checkpoints(tmp_path):
    save(tmp_path, 5, some_files())
    printed, errors = start(FULL_DISK, tmp_path).communicate(timeout=120)
    assert (printed, errors) == (f"OSError {errno.EFBIG}\n" * 2, "")
    assert names(tmp_path) == ["checkpoint-5"]
    assert load(tmp_path / "checkpoint-5").files == some_files()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only folder")
def test_a_read_only_folder_is_an_error_and_loses_nothing(tmp_path, capsys):
    save(tmp_path, 5, some_files())
    tmp_path.chmod(0o555)
    try:
        for step in (5, 6):
            with pytest.raises(PermissionError):
                save(tmp_path, step, some_files(1))
        write_status(tmp_path, "failed", step=5, last_good_checkpoint=None)
    finally:
        tmp_path.chmod(0o755)
    assert "train_state.json: Permission denied" in capsys.readouterr().err
    assert names(tmp_path) == ["checkpoint-5"]
    assert load(tmp_path / "checkpoint-5").files == some_files()


def test_a_vanished_output_folder_that_became_a_file_is_an_error(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OSError):
        save(tmp_path / "out", 1, some_files())
    assert (tmp_path / "out").read_text() == "mine"


# ---- Prune and clean ----


def test_prune_removes_the_lowest_numbers_only(tmp_path):
    for step in (9, 10, 100, 11):
        save(tmp_path, step, some_files())
    assert prune(tmp_path, 4) == []
    assert prune(tmp_path, 2) == [tmp_path / "checkpoint-9", tmp_path / "checkpoint-10"]
    assert names(tmp_path) == ["checkpoint-100", "checkpoint-11"]


def test_prune_keeps_at_least_one(tmp_path):
    with pytest.raises(ValueError):
        prune(tmp_path, 0)


def test_prune_leaves_alone_what_is_not_ours(tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    for step in (50, 60):
        save(out, step, some_files())
    # Another trainer's folder, an empty one, one of ours renamed or misnumbered, a link, a newer version's, a file.
    (out / "checkpoint-1").mkdir()
    (out / "checkpoint-1" / "optimizer.bin").write_text("mine")
    (out / "checkpoint-2").mkdir()
    save(out, 3, some_files()).rename(out / "checkpoint-3-best")
    save(out, 3, some_files()).rename(out / "checkpoint-4")
    save(elsewhere, 5, some_files())
    (out / "checkpoint-5").symlink_to(elsewhere / "checkpoint-5")
    resealed(schema=99)(save(out, 6, some_files()))
    (out / "checkpoint-7").write_text("mine")
    (out / "checkpoint-08").mkdir()
    before = names(out)
    assert prune(out, 1) == [out / "checkpoint-50"]
    assert names(out) == [name for name in before if name != "checkpoint-50"]
    assert load(elsewhere / "checkpoint-5").files == some_files()


def test_prune_follows_no_link_inside_a_checkpoint(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    (save(tmp_path, 1, some_files()) / "link").symlink_to(tmp_path / "precious")
    save(tmp_path, 2, some_files())
    prune(tmp_path, 1)
    assert checkpoints(tmp_path) == [2]
    assert (tmp_path / "precious" / "file").read_text() == "mine"


def test_a_damaged_checkpoint_never_drives_out_a_sound_one(tmp_path):
    for step in (50, 60, 100):
        save(tmp_path, step, some_files())
    (tmp_path / "checkpoint-100" / "lora.safetensors").write_bytes(b"")
    prune(tmp_path, 1)
    assert find_latest(tmp_path)[0].step == 60


def test_the_checkpoint_just_saved_is_safe_below_older_numbers(tmp_path):
    for step in (50, 100, 150):
        save(tmp_path, step, some_files())
    newest = save(tmp_path, 75, some_files())
    prune(tmp_path, 2, newest=newest)
    assert checkpoints(tmp_path) == [75, 100, 150]


def test_leftovers_are_cleared_and_nothing_else(tmp_path):
    (tmp_path / ".tmp-flux_db-new-1-aa").write_text("half a file")
    (tmp_path / ".tmp-flux_db-old-1-bb").mkdir()
    (tmp_path / ".tmp-flux_db-old-1-bb" / "file").write_text("half a folder")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    (tmp_path / ".tmp-flux_db-new-1-cc").symlink_to(tmp_path / "precious")
    (tmp_path / ".tmp-of-others").write_text("mine")
    save(tmp_path, 5, some_files())
    assert len(clean_leftovers(tmp_path)) == 3
    assert names(tmp_path) == [".tmp-of-others", "checkpoint-5", "precious"]
    assert names(tmp_path / "precious") == ["file"]
    assert clean_leftovers(tmp_path) == clean_leftovers(tmp_path / "nowhere") == []


def test_a_complete_checkpoint_without_its_name_is_recovered_new_before_old(tmp_path):
    save(tmp_path, 5, some_files(1)).rename(tmp_path / ".tmp-flux_db-old-1-aa")
    save(tmp_path, 5, some_files(2)).rename(tmp_path / ".tmp-flux_db-new-1-bb")
    recovered, removed = clean_leftovers(tmp_path)
    assert recovered.startswith(f"{tmp_path / 'checkpoint-5'}: recovered")
    assert removed.startswith(str(tmp_path / ".tmp-flux_db-old-1-aa"))
    assert names(tmp_path) == ["checkpoint-5"]
    assert load(tmp_path / "checkpoint-5").files == some_files(2)


# ---- What may change ----

BINDING = frozenset(
    {
        "base_precision",
        "concepts",
        "revision",
        "variant",
        "instance_prompt",
        "with_prior_preservation",
        "class_prompt",
        "num_class_images",
        "prior_loss_weight",
        "resolution",
        "aspect_ratio_buckets",
        "max_buckets",
        "center_crop",
        "cache_crops",
        "random_flip",
        "repeats",
        "alpha_mask",
        "unmasked_weight",
        "caption_dropout",
        "trigger_word",
        "alpha_background",
        "max_sequence_length",
        "cache_latents",
        "rank",
        "lora_alpha",
        "lora_dropout",
        "lora_compute",
        "lora_layers",
        "lora_rank_pattern",
        "lora_lr_pattern",
        "loraplus_ratio",
        "init_lora_resize",
        "init_lora_transformer_only",
        "train_text_encoder",
        "text_encoder_lr",
        "adam_weight_decay_text_encoder",
        "text_encoder_rank",
        "text_encoder_layers",
        "text_encoder_steps",
        "guidance_scale",
        "weighting_scheme",
        "logit_mean",
        "logit_std",
        "timestep_sampling",
        "sigmoid_scale",
        "flow_shift",
        "mode_scale",
        "loss",
        "huber_delta",
        "huber_schedule",
        "optimizer",
        "learning_rate",
        "scale_lr",
        "lr_scheduler",
        "lr_warmup_steps",
        "lr_num_cycles",
        "lr_power",
        "adam_beta1",
        "adam_beta2",
        "adam_weight_decay",
        "adam_epsilon",
        "max_grad_norm",
        "ema_decay",
        "preserve_class",
        "preserve_weight",
        "seed",
        "mixed_precision",
    }
)


def settings(**changes):
    base = {
        "pretrained_model_name_or_path": "flux",
        "instance_data_dir": "dog",
        "instance_prompt": "a photo of sks dog",
    }
    flat = to_flat_dict(from_flat_dict(base)) | {"model_fingerprint": "m1", "data_fingerprint": "d1"}
    return flat | changes


def changes(old, new, devices=(1, 1)):
    return changed_settings(old, new, world_size_old=devices[0], world_size_new=devices[1])


def changed_names(old, new, devices=(1, 1)):
    return [change.name for change in changes(old, new, devices)]


def test_every_setting_is_free_or_binds():
    """A new setting fails here until somebody has decided which it is."""
    known = set(settings()) - {"model_fingerprint", "data_fingerprint"}
    removed = {"enable_mindspore_data_sink"}  # of version 0.1, whose checkpoints still resume
    groups = [FREE - removed, frozenset(GLOBAL_BATCH), frozenset(LENGTH), BINDING]
    assert set().union(*groups) == known
    assert sum(map(len, groups)) == len(known)


@pytest.mark.parametrize("name", sorted(BINDING))
def test_a_binding_setting_is_a_change(name):
    assert changes(settings(), settings(**{name: "other"})) == [Change(name, settings()[name], "other")]


def test_free_settings_are_no_change():
    assert changes(settings(), settings(**dict.fromkeys(FREE, "other"))) == []


def test_the_same_settings_after_json_are_no_change():
    old = settings(validation_prompt=["a", "b"], allow_changed=["rank"])
    assert changes(json.loads(json.dumps(old)), old) == []


def test_a_setting_unknown_to_this_version_or_to_the_old_one_is_a_change():
    old, new = settings(), settings(brand_new=None)
    assert changes(old, new) == [Change("brand_new", "(not recorded)", None)]
    assert changes(new, old) == [Change("brand_new", None, "(not recorded)")]


def test_folders_may_move_but_their_content_binds():
    moved = settings(pretrained_model_name_or_path="elsewhere", instance_data_dir="there", class_data_dir="too")
    assert changes(settings(), moved) == []
    found = changes(settings(), moved | {"model_fingerprint": "m2", "data_fingerprint": "d2"})
    assert found == [
        Change("pretrained_model_name_or_path", "flux with content m1", "elsewhere with content m2"),
        Change("instance_data_dir", "dog with content d1", "there with content d2"),
    ]


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "cosine_with_restarts", "polynomial"])
@pytest.mark.parametrize("name", LENGTH)
def test_a_longer_run_is_free_and_a_shorter_one_bends_the_schedule(name, scheduler):
    old, longer = settings(lr_scheduler=scheduler, **{name: 10}), settings(lr_scheduler=scheduler, **{name: 20})
    assert changes(old, longer) == []
    assert changes(longer, old) == [Change(name, 20, 10)]


@pytest.mark.parametrize("scheduler", ["constant", "constant_with_warmup"])
def test_any_length_is_free_without_a_curve(scheduler):
    old = settings(lr_scheduler=scheduler, max_train_steps=20)
    for new in ({"max_train_steps": 10}, {"max_train_steps": None, "num_train_epochs": 3}, {"max_train_steps": 30}):
        assert changes(old, old | new) == []


def test_steps_override_epochs_and_cannot_be_compared_with_them():
    by_steps = settings(lr_scheduler="cosine", max_train_steps=100, num_train_epochs=9)
    assert changes(by_steps, by_steps | {"num_train_epochs": 1}) == []
    assert changes(by_steps, by_steps | {"max_train_steps": None}) == [Change("max_train_steps", 100, None)]


def test_the_global_batch_may_be_dealt_in_any_way():
    old = settings(train_batch_size=4)
    for batch, accumulation, devices in [(1, 4, 1), (2, 2, 1), (1, 1, 4), (2, 1, 2)]:
        new = settings(train_batch_size=batch, gradient_accumulation_steps=accumulation, distributed=devices > 1)
        assert changes(old, new, devices=(1, devices)) == []
        assert changes(new, old, devices=(devices, 1)) == []
    (change,) = changes(old, old, devices=(1, 2))
    assert change.name == "train_batch_size"
    assert change.old.endswith("= 4") and change.new.endswith("= 8")


def test_every_change_not_allowed_is_listed_with_the_flag_that_allows_all():
    found = changes(settings(), settings(rank=8, seed=7, resolution=256))
    refuse_changes(found, frozenset({"rank", "seed", "resolution"}), place="out/checkpoint-5")
    refuse_changes([], frozenset(), place="out/checkpoint-5")
    with pytest.raises(UserError) as caught:
        refuse_changes(found, frozenset({"rank"}), place="out/checkpoint-5")
    text = str(caught.value)
    assert text.startswith("out/checkpoint-5: the checkpoint was made with other settings")
    assert "seed: 42 in the checkpoint, 7 now" in text and "resolution: 512 in the checkpoint, 256 now" in text
    assert "rank: 16" not in text
    assert text.endswith("--allow_changed rank,resolution,seed")


@pytest.mark.parametrize("change", [{"model_fingerprint": 2}, {"data_fingerprint": 2}, {"train_batch_size": 3}])
def test_every_change_can_be_allowed_by_a_name_the_command_line_knows(change):
    (name,) = changed_names(settings(), settings(**change))
    assert name in to_flat_dict(from_flat_dict({k: settings()[k] for k in settings() if "fingerprint" not in k}))


# ---- The lock ----

HOLDER = """
import os, subprocess, sys, time
from flux_db.run.lock import OutputLock
with OutputLock(sys.argv[1]):
    child = 0
    if sys.argv[2] == "fork":
        child = os.fork()
        if child == 0:
            print(os.getpid(), flush=True)
            os.close(1), os.close(2)
            time.sleep(300)
            os._exit(0)
    elif sys.argv[2] == "spawn":
        quiet = subprocess.DEVNULL
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], close_fds=False,
                                 stdin=quiet, stdout=quiet, stderr=quiet).pid
    if sys.argv[2] != "fork":
        print(child, flush=True)
    time.sleep(300)
"""


def test_a_second_run_is_refused_while_the_first_lives_and_not_after_kill_9(tmp_path):
    holder = start(HOLDER, tmp_path / "out", "alone")
    try:
        holder.stdout.readline()
        year = time.strftime("%Y-")
        with (
            pytest.raises(UserError, match=f"process {holder.pid} on {os.uname().nodename}, started {year}"),
            OutputLock(tmp_path / "out"),
        ):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with OutputLock(tmp_path / "out"):
        pass


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_child_does_not_hold_the_lock_of_its_dead_parent(tmp_path, how):
    holder = start(HOLDER, tmp_path, how)
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(UserError), OutputLock(tmp_path):
            pass
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        with OutputLock(tmp_path):
            pass
    finally:
        holder.kill()
        holder.communicate()
        os.kill(child, signal.SIGKILL)


def test_the_lock_is_not_taken_through_a_link(tmp_path):
    """Once this emptied the file elsewhere."""
    (tmp_path / "precious").write_text("my thesis")
    for target in (tmp_path / "precious", tmp_path / "new"):
        output = tmp_path / f"out-{target.name}"
        output.mkdir()
        (output / ".lock").symlink_to(target)
        with pytest.raises(UserError, match=r"its \.lock is a link; remove that"), OutputLock(output):
            pass
    assert (tmp_path / "precious").read_text() == "my thesis" and not (tmp_path / "new").exists()


def test_the_lock_is_a_file(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(UserError, match=r"its \.lock is not a file; remove that"), OutputLock(tmp_path):
        pass
    os.unlink(tmp_path / ".lock")
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match="cannot be written: Is a directory"), OutputLock(tmp_path):
        pass


def test_the_lock_ends_with_its_block_also_by_an_error(tmp_path):
    with pytest.raises(RuntimeError), OutputLock(tmp_path):
        raise RuntimeError
    with OutputLock(tmp_path), pytest.raises(UserError), OutputLock(tmp_path):
        pass
    with OutputLock(tmp_path):
        pass


def test_a_forked_child_that_leaves_the_block_does_not_end_the_lock(tmp_path):
    with OutputLock(tmp_path) as lock:
        child = os.fork()
        if child == 0:
            lock.__exit__(None, None, None)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(UserError, match=f"process {os.getpid()} "), OutputLock(tmp_path):
            pass


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="cannot be written"), OutputLock(tmp_path / "file"):
        pass


# ---- How the run stands ----


def test_the_state_of_the_run_is_read_back(tmp_path):
    assert read_status(tmp_path) is None
    write_status(tmp_path, "running", step=0, last_good_checkpoint=None)
    folder = save(tmp_path, 5, some_files())
    write_status(tmp_path, "failed", step=7, last_good_checkpoint=folder, message="the disk is full")
    state = read_status(tmp_path)
    assert (state.status, state.step, state.message) == ("failed", 7, "the disk is full")
    assert load(state.last_good_checkpoint).step == 5
    assert json.loads((tmp_path / "train_state.json").read_text())["status"] == "failed"
    assert names(tmp_path) == ["checkpoint-5", "train_state.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"status": "running"}'])
def test_an_unreadable_state_is_no_state(tmp_path, content):
    (tmp_path / "train_state.json").write_text(content)
    assert read_status(tmp_path) is None


def test_an_unknown_status_is_a_bug(tmp_path):
    with pytest.raises(ValueError):
        write_status(tmp_path, "done", step=1, last_good_checkpoint=None)
