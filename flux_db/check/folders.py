"""Where the folders of a run may lie: apart from its pictures, or a second run would train on what the first has drawn.

Pictures are looked for in all folders below --instance_data_dir, those of --concepts, --class_data_dir and
--validation_data_dir. So these have nothing in common, and nothing that the program writes lies in one of them.
Pictures that the user gives do not lie in a folder that the program writes either; class pictures, which it draws
itself, may lie in --output_dir.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from flux_db.output_folder import SAMPLES, THUMBNAILS
from flux_db.problem import Problem
from flux_db.settings.derived import cache_path, class_path
from flux_db.settings.schema import Config

# Where the program puts pictures below --output_dir.
DRAWN = (SAMPLES, THUMBNAILS)

WRITTEN = ("output_dir", "logging_dir", "encode_cache_dir")

# A folder for downloads, in contrast to these, may contain anything.
AROUND_NOTHING = ("output_dir", "encode_cache_dir", "mask_dir")


class _Folder(NamedTuple):
    """A folder that a setting names."""

    flag: str
    path: str
    key: str = ""
    """Of an entry of --concepts."""

    def __str__(self) -> str:
        return f"--{self.flag}{f': {self.key}' if self.key else ''} {self.path}"


def problems(config: Config) -> list[Problem]:
    """Folders that lie in each other, through links as well; each problem names both flags."""
    pictures, written = _picture_folders(config), _written_folders(config)
    found = [
        Problem(
            f"{one}: {relation} {other}, and each takes all pictures below it; choose folders apart",
            flag=one.flag,
            also=(other.flag,),
        )
        for other, one in combinations(pictures, 2)
        if (relation := _relation(one.path, other.path))
    ]
    # a folder of masks is not written, but its pictures are not to be trained on either
    for one in written:
        for other in pictures:
            relation = _relation(one.path, other.path)
            if relation in (_SAME, _INSIDE):
                text = f"{one}: {relation} {other}, where every picture is used; choose a folder outside of it"
                found.append(Problem(text, flag=one.flag, also=(other.flag,)))
            elif relation == _AROUND and other.flag != "class_data_dir" and (one.key or one.flag) in AROUND_NOTHING:
                text = f"{one}: {relation} {other}, and must lie apart from it; choose another folder"
                found.append(Problem(text, flag=one.flag, also=(other.flag,)))
    for one in pictures:
        if one.flag == "class_data_dir":
            found += _class_problems(config, one)
    return found + _model_problems(config, written)


def _model_problems(config: Config, written: Iterable[_Folder]) -> list[Problem]:
    """What the program writes into the folder of a model would be taken for a part of it."""
    model = _Folder("pretrained_model_name_or_path", config.model.pretrained_model_name_or_path)
    if not os.path.isdir(model.path):
        return []
    return [
        Problem(f"{one}: {relation} {model}; choose a folder outside of it", flag=one.flag, also=(model.flag,))
        for one in written
        if one.flag in WRITTEN and (relation := _relation(one.path, model.path)) in (_SAME, _INSIDE)
    ]


def _class_problems(config: Config, folder: _Folder) -> list[Problem]:
    return [
        Problem(
            f"{folder}: {relation} {label}, where the program puts other pictures; choose another folder",
            flag="class_data_dir",
            also=("output_dir", "encode_cache_dir"),
        )
        for label, place in _own_places(config).items()
        if (relation := _relation(folder.path, place)) in (_SAME, _INSIDE)
    ]


def strays(config: Config, flag: str, pictures: Iterable[Path]) -> list[Problem]:
    """Pictures of the flag's folder that through a link lie where the program writes."""
    places = _own_places(config)
    if flag != "class_data_dir":
        places[f"--output_dir {config.output.output_dir}"] = config.output.output_dir
    real = {label: _real(place) for label, place in places.items()}
    found = []
    for picture in pictures:
        here = _real(picture)
        label = next((label for label, place in real.items() if here.is_relative_to(place)), None)
        if label:
            found.append(Problem(f"lies in {label} through a link; take the link out", path=picture))
    return found


def _picture_folders(config: Config) -> list[_Folder]:
    """Of all pictures that are used."""
    data = config.data
    dataset = data.dataset_name if data.dataset_name is not None and os.path.isdir(data.dataset_name) else None
    given = {
        "instance_data_dir": data.instance_data_dir,
        "dataset_name": dataset,
        "class_data_dir": data.class_data_dir or (str(class_path(config)) if data.with_prior_preservation else None),
        "validation_data_dir": config.validation.validation_data_dir,
    }
    own = [_Folder("concepts", concept.dir, "dir") for concept in data.concepts]
    return [*own, *(_Folder(flag, path) for flag, path in given.items() if path)]


def _written_folders(config: Config) -> list[_Folder]:
    """Of what is not to be taken for pictures."""
    logs = Path(config.output.output_dir, config.output.logging_dir)
    given = {
        "output_dir": config.output.output_dir,
        "logging_dir": None if _relation(str(logs), config.output.output_dir) in (_SAME, _INSIDE) else str(logs),
        "encode_cache_dir": config.data.encode_cache_dir,
        "cache_dir": config.model.cache_dir,
        "mask_dir": config.data.mask_dir,
    }
    masks = dict.fromkeys(concept.mask_dir for concept in config.data.concepts if concept.mask_dir)
    folders = [_Folder(flag, path) for flag, path in given.items() if path]
    return [*folders, *(_Folder("concepts", path, "mask_dir") for path in masks)]


def _own_places(config: Config) -> dict[str, str]:
    """What to call a folder that holds only the program's own files -> the folder."""
    output, cache = config.output.output_dir, config.data.encode_cache_dir
    label = f"cache in --output_dir {output}" if cache is None else f"--encode_cache_dir {cache}"
    drawn = {f"{name} in --output_dir {output}": os.path.join(output, name) for name in DRAWN}
    return {label: str(cache_path(config)), **drawn}


_SAME, _INSIDE, _AROUND = "is the same folder as", "lies in", "contains"


def _relation(path: str, other: str) -> str | None:
    """How a folder lies to another; None if they are apart."""
    one, two = _real(path), _real(other)
    if one == two:
        return _SAME
    # the search for pictures follows links: what is inside by its name is inside
    if one.is_relative_to(two) or Path(os.path.abspath(path)).is_relative_to(os.path.abspath(other)):
        return _INSIDE
    return _AROUND if two.is_relative_to(one) else None


def _real(path: Path | str) -> Path:
    """Without links; of a folder that is yet to be made, those of what is there."""
    return Path(os.path.realpath(path))
