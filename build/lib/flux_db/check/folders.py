"""Where the folders of a run may lie: apart from its pictures, or a second run would train on what the first has drawn.

Pictures are looked for in all folders below --instance_data_dir, --class_data_dir and --validation_data_dir. So these
three have nothing in common, and nothing that the program writes lies in one of them. Pictures that the user gives do
not lie in a folder that the program writes either; class pictures, which it draws itself, may lie in --output_dir.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

from flux_db.output_folder import SAMPLES, THUMBNAILS
from flux_db.problem import Problem
from flux_db.settings.derived import cache_path
from flux_db.settings.schema import Config

# Where the program puts pictures below --output_dir.
DRAWN = (SAMPLES, THUMBNAILS)

# A folder for downloads, in contrast to these, may contain anything.
AROUND_NOTHING = ("output_dir", "encode_cache_dir", "mask_dir")


def problems(config: Config) -> list[Problem]:
    """Folders that lie in each other, through links as well; each problem names both flags."""
    pictures, written = _picture_folders(config), _written_folders(config)
    found = [
        Problem(
            f"--{flag} {path}: {relation} --{other} {place}, and each takes all pictures below it; choose folders"
            " apart",
            flag=flag,
            also=(other,),
        )
        for (other, place), (flag, path) in combinations(pictures.items(), 2)
        if (relation := _relation(path, place))
    ]
    # a folder of masks is not written, but its pictures are not to be trained on either
    for flag, path in written.items():
        for other, place in pictures.items():
            relation = _relation(path, place)
            if relation in (_SAME, _INSIDE):
                found.append(
                    Problem(
                        f"--{flag} {path}: {relation} --{other} {place}, where every picture is used; choose a folder"
                        " outside of it",
                        flag=flag,
                        also=(other,),
                    )
                )
            elif relation == _AROUND and other != "class_data_dir" and flag in AROUND_NOTHING:
                found.append(
                    Problem(
                        f"--{flag} {path}: {relation} --{other} {place}, and must lie apart from it; choose another"
                        " folder",
                        flag=flag,
                        also=(other,),
                    )
                )
    if class_dir := pictures.get("class_data_dir"):
        found += [
            Problem(
                f"--class_data_dir {class_dir}: {relation} {label}, where the program puts other pictures; choose"
                " another folder",
                flag="class_data_dir",
                also=("output_dir", "encode_cache_dir"),
            )
            for label, place in _own_places(config).items()
            if (relation := _relation(class_dir, place)) in (_SAME, _INSIDE)
        ]
    return found


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


def _picture_folders(config: Config) -> dict[str, str]:
    """Flag -> folder, of all pictures that are used."""
    data = config.data
    folders = {"instance_data_dir": data.instance_data_dir}
    if data.dataset_name is not None and os.path.isdir(data.dataset_name):
        folders["dataset_name"] = data.dataset_name
    folders |= {"class_data_dir": data.class_data_dir, "validation_data_dir": config.validation.validation_data_dir}
    return {flag: folder for flag, folder in folders.items() if folder}


def _written_folders(config: Config) -> dict[str, str]:
    """Flag -> folder, of what is not to be taken for pictures."""
    logs = Path(config.output.output_dir, config.output.logging_dir)
    folders = {
        "output_dir": config.output.output_dir,
        "logging_dir": None if _relation(str(logs), config.output.output_dir) in (_SAME, _INSIDE) else str(logs),
        "encode_cache_dir": config.data.encode_cache_dir,
        "cache_dir": config.model.cache_dir,
        "mask_dir": config.data.mask_dir,
    }
    return {flag: folder for flag, folder in folders.items() if folder}


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
