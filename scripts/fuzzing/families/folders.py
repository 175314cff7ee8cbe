"""Folders inside of each other, also by links; places that cannot be written; files that are links elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from fuzzing import hostile
from fuzzing.case import Bench, Case, Expect, Plan, either, fine, plan, refused
from fuzzing.hostile import KINDS
from fuzzing.looks import can_start, counts

# Flag -> the other flags that it needs. The program writes into the first three, and trains on none of them.
PLACES: dict[str, dict[str, object]] = {
    "output_dir": {},
    "encode_cache_dir": {},
    "class_data_dir": {"with_prior_preservation": True, "class_prompt": "a dog", "num_class_images": 1},
    "validation_data_dir": {},
}

# Where a place may lie, relative to pictures/ in the case's folder; all of them are in it, it, or around it.
NESTED = {
    "the pictures themselves": "pictures",
    "with a slash": "pictures/",
    "by way of the parent": "other/../pictures",
    "in the pictures": "pictures/inside",
    "deep in the pictures": "pictures/a/b/c",
    "around the pictures": ".",
    "absolute, in the pictures": "{folder}/pictures/inside",
    "a link to the pictures": "link",
    "in a link to the pictures": "link/inside",
    "a link that is in the pictures": "pictures/out",
    "around, by a link": "around",
}

# What nobody can lock, or what would be written elsewhere.
NO_LOCKS = (
    "a folder",
    "a socket",
    "a link to /dev/zero",
    "a link to /dev/null",
    "a link to nowhere",
    "a link to itself",
)


def plans() -> Iterator[Plan]:
    for flag in PLACES:
        for about, place in NESTED.items():
            # a link in the picture folder leads out of it: walked into it would be trained on
            yield plan(f"--{flag}: {about}", nested, flag, place)
        yield plan(f"--{flag}: beside the pictures", beside, flag)
        yield plan(f"--{flag}: of nearly the same name", nearly, flag)
    for about in KINDS:
        for flag in ("output_dir", "encode_cache_dir"):
            yield plan(f"--{flag} is {about}", special, flag, about)
        yield plan(f"--output_dir in {about}", special_parent, about)
        if about in NO_LOCKS:
            yield plan(f".lock is {about}", lock, about)
        yield plan(f"the contact sheet is {about}", target, "contact_sheet.png", about)
        yield plan(f"the table is {about}", target, "pictures.csv", about)
    for place in ("/proc/out", "/sys/out", "/dev/null", "/dev/null/out", "/dev/full", "out/" + "x" * 300, "o/" * 2500):
        yield plan(f"--output_dir {place[:30]}", somewhere, place, refused("--output_dir"))
    for about, build in LINKS.items():
        yield plan(about, build)


def pictures_here(bench: Bench) -> Path:
    """Pictures in the case's folder, with links around them."""
    pictures = bench.world.copy_pictures(bench.folder / "pictures")
    (bench.folder / "other").mkdir()
    os.symlink("pictures", bench.folder / "link")
    os.symlink(".", bench.folder / "around")
    return pictures


def nested(bench: Bench, flag: str, place: str) -> Case:
    pictures = pictures_here(bench)
    if place == "pictures/out":
        (pictures / "out").symlink_to("../other")
    if flag == "validation_data_dir" and place.endswith(("inside", "c")):
        bench.world.copy_pictures(Path(bench.folder, place.format(folder=bench.folder)))
    changes = {"output_dir": "result", **PLACES[flag], flag: place.format(folder=bench.folder)}
    case = bench.check(refused(f"--{flag}"), instance_data_dir="pictures", **changes)
    return case.but(writes=() if flag == "output_dir" else ("result",))


def beside(bench: Bench, flag: str) -> Case:
    pictures_here(bench)
    if flag == "validation_data_dir":
        bench.world.copy_pictures(bench.folder / "beside")
    changes = {**PLACES[flag], flag: "beside"}
    return bench.check(fine(can_start), instance_data_dir="pictures", **changes).but(writes=("out", "beside"))


def nearly(bench: Bench, flag: str) -> Case:
    """pictures-2 begins with pictures, but does not lie in it."""
    pictures_here(bench)
    if flag == "validation_data_dir":
        bench.world.copy_pictures(bench.folder / "pictures-2")
    changes = {**PLACES[flag], flag: "pictures-2"}
    return bench.check(fine(can_start), instance_data_dir="pictures", **changes).but(writes=("out", "pictures-2"))


def special(bench: Bench, flag: str, about: str) -> Case:
    KINDS[about](bench.path("place"))
    # an empty folder is what one would want, and a link to nowhere may be where a folder is to be made
    expect = either(f"--{flag}") if about in ("a folder", "a link to nowhere") else refused(f"--{flag}")
    return bench.check(expect, **{flag: "place"}).but(writes=("out", "place", "nowhere"))


def special_parent(bench: Bench, about: str) -> Case:
    KINDS[about](bench.path("place"))
    expect = fine(can_start) if about == "a folder" else refused("--output_dir")
    return bench.check(expect, output_dir="place/out").but(writes=("place",))


def somewhere(bench: Bench, place: str, expect: Expect) -> Case:
    return bench.check(expect, output_dir=place)


def lock(bench: Bench, about: str) -> Case:
    """Refused before anything is loaded: the lock is the first thing that is written."""
    KINDS[about](bench.path("out/.lock"))
    return bench.run(refused("--output_dir", ".lock"), "train", *bench.flags())


def target(bench: Bench, name: str, about: str) -> Case:
    KINDS[about](bench.path(f"out/{name}"))
    expect = refused("--output_dir") if about == "a folder" else fine(can_start)
    return bench.check(expect)


# --- links out of the output folder --------------------------------------------------------------------------------


def linked(name: str) -> Callable[[Bench], Case]:
    """A file of the output folder that is a link to somebody's file: it is replaced, never written through."""

    def build(bench: Bench) -> Case:
        bench.write("mine.txt", "do not touch")
        bench.path(f"out/{name}").symlink_to("../mine.txt")
        return bench.check(fine(can_start))

    return build


def linked_lock(bench: Bench) -> Case:
    bench.write("mine.txt", "do not touch")
    bench.path("out/.lock").symlink_to("../mine.txt")
    return bench.run(refused("--output_dir", ".lock"), "train", *bench.flags())


def linked_output(bench: Bench) -> Case:
    (bench.folder / "real").mkdir()
    bench.path("out").symlink_to("real")
    return bench.check(fine(can_start)).but(writes=("real",))


def model_is_the_output(bench: Bench) -> Case:
    model = bench.world.copy_model(bench.folder / "model")
    place = model / "transformer"
    case = bench.check(either("--output_dir"), pretrained_model_name_or_path=model, output_dir=place)
    return case.but(writes=("model/transformer/contact_sheet.png", "model/transformer/pictures.csv"))


def pictures_of_the_model(bench: Bench) -> Case:
    return bench.check(refused("--instance_data_dir"), instance_data_dir=bench.world.model)


def a_used_output(bench: Bench) -> Case:
    for name in ("config.yaml", "metrics.jsonl", "train_state.json", "notes.txt"):
        bench.write(f"out/{name}", hostile.TERMINAL)
    case = bench.check(fine(counts(3)))
    return case.but(writes=("out/contact_sheet.png", "out/pictures.csv"))


LINKS: dict[str, Callable[[Bench], Case]] = {
    "the contact sheet is a link to a file elsewhere": linked("contact_sheet.png"),
    "the table is a link to a file elsewhere": linked("pictures.csv"),
    "the lock is a link to a file elsewhere": linked_lock,
    "the output folder is a link": linked_output,
    "the output folder is in the model": model_is_the_output,
    "the pictures are the model": pictures_of_the_model,
    "the output folder was used before": a_used_output,
}
