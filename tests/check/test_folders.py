"""Folders that lie in each other: the program never trains on its own pictures, nor on those of another flag."""

import pytest
from program import command, flags, run

from flux_db.check import folders
from flux_db.check.pictures import check_pictures
from flux_db.check.values import check_values
from flux_db.demo.pictures import write_demo_pictures
from flux_db.output_folder import SAMPLES, THUMBNAILS
from flux_db.settings.schema import from_flat_dict

PRIOR = {"with_prior_preservation": True, "class_prompt": "a dog"}


def config(**changes):
    values = {"pretrained_model_name_or_path": "o/m", "instance_data_dir": "pics", "instance_prompt": "dog"}
    return from_flat_dict(values | {"output_dir": "out"} | changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"output_dir": "pics/out"}, "--output_dir pics/out: lies in --instance_data_dir pics,"),
        ({"output_dir": "pics"}, "--output_dir pics: is the same folder as --instance_data_dir pics,"),
        ({"output_dir": "."}, "--output_dir .: contains --instance_data_dir pics,"),
        ({"instance_data_dir": "out/pics"}, "--output_dir out: contains --instance_data_dir out/pics,"),
        ({"instance_data_dir": ".", "output_dir": "out"}, "--output_dir out: lies in --instance_data_dir .,"),
        ({"encode_cache_dir": "pics/a/../b"}, "--encode_cache_dir pics/a/../b: lies in --instance_data_dir pics,"),
        ({"encode_cache_dir": "."}, "--encode_cache_dir .: contains --instance_data_dir pics,"),
        ({"cache_dir": "pics/hub"}, "--cache_dir pics/hub: lies in --instance_data_dir pics,"),
        ({"logging_dir": "../pics/logs"}, "--logging_dir out/../pics/logs: lies in --instance_data_dir pics,"),
        ({"mask_dir": "."}, "--mask_dir .: contains --instance_data_dir pics,"),
        ({"mask_dir": "pics"}, "--mask_dir pics: is the same folder as --instance_data_dir pics,"),
        ({"validation_data_dir": "pics/held"}, "--validation_data_dir pics/held: lies in --instance_data_dir pics,"),
        ({"validation_data_dir": ".", "output_dir": "../out"}, "--validation_data_dir .: contains --instance"),
        ({"validation_data_dir": "held", "output_dir": "held/x"}, "--output_dir held/x: lies in --validation_data_dir"),
        ({**PRIOR, "class_data_dir": "pics/c"}, "--class_data_dir pics/c: lies in --instance_data_dir pics,"),
        ({**PRIOR, "class_data_dir": "c", "output_dir": "c/x"}, "--output_dir c/x: lies in --class_data_dir c,"),
        ({**PRIOR, "class_data_dir": "out/samples"}, "--class_data_dir out/samples: is the same folder as samples in"),
        ({**PRIOR, "class_data_dir": "out/cache/c"}, "--class_data_dir out/cache/c: lies in cache in --output_dir out"),
        ({**PRIOR, "class_data_dir": "link/c"}, "--class_data_dir link/c: lies in --instance_data_dir pics,"),
        ({"output_dir": "link/new/run"}, "--output_dir link/new/run: lies in --instance_data_dir pics,"),
        ({"instance_data_dir": "link", "output_dir": "pics/x"}, "--output_dir pics/x: lies in --instance_data_dir"),
        ({"output_dir": "o/m"}, "--output_dir o/m: is the same folder as --pretrained_model_name_or_path o/m; choose"),
        ({"output_dir": "o/m/run"}, "--output_dir o/m/run: lies in --pretrained_model_name_or_path o/m; choose"),
        ({"encode_cache_dir": "o/m/c"}, "--encode_cache_dir o/m/c: lies in --pretrained_model_name_or_path o/m;"),
        ({"instance_data_dir": None, "dataset_name": "pics", "output_dir": "pics/o"}, "--output_dir pics/o: lies in"),
    ],
)  # fmt: skip
def test_what_lies_in_each_other_is_refused(tmp_path, monkeypatch, changes, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pics").mkdir()
    (tmp_path / "o" / "m").mkdir(parents=True)
    (tmp_path / "link").symlink_to("pics")
    (found,) = check_values(config(**changes))
    assert found.startswith(problem)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"output_dir": "pics2", "encode_cache_dir": "pics-cache", "mask_dir": "masks", "cache_dir": "."},
        {"instance_data_dir": "outputs/demo/pictures", "output_dir": "outputs/demo/run"},
        {**PRIOR, "class_data_dir": "out/class", "validation_data_dir": "held"},
        {"encode_cache_dir": "out/cache"},
    ],
)
def test_folders_side_by_side_are_fine(tmp_path, monkeypatch, changes):
    monkeypatch.chdir(tmp_path)
    assert check_values(config(**changes)) == []


def test_the_places_of_drawn_pictures_have_these_names():
    assert folders.DRAWN == (SAMPLES, THUMBNAILS)


def test_a_link_among_the_pictures_leads_to_no_picture_of_the_program(tmp_path):
    places = {"instance_data_dir": "pics", "class_data_dir": "class", "validation_data_dir": "held"}
    for number, name in enumerate(["pics", "class", "held", "out/samples/step-00010"]):
        write_demo_pictures(tmp_path / name, 1, 16 + number)
    settings = config(
        output_dir=str(tmp_path / "out"), resolution=16, **PRIOR, num_class_images=1,
        **{flag: str(tmp_path / name) for flag, name in places.items()},
    )  # fmt: skip
    assert check_pictures(settings) == []
    for flag, name in places.items():
        (tmp_path / name / "more").symlink_to(tmp_path / "out/samples")
        (problem,) = check_pictures(settings)
        picture = tmp_path / name / "more/step-00010/dog_00.png"
        assert problem.startswith(f"--{flag}: {picture}: lies in samples in --output_dir")
        (tmp_path / name / "more").unlink()


def test_a_second_run_does_not_train_on_the_first_ones_pictures(world, tmp_path):
    """Once it did: on its samples, its contact sheet and the pictures of its report."""
    write_demo_pictures(tmp_path / "pictures", 5, 64)
    output = tmp_path / "pictures" / "out"
    settings = world.settings(output, instance_data_dir=tmp_path / "pictures")
    for _ in range(2):
        done = run(command("check", *flags(settings)))
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith(f"error: --output_dir {output}: lies in --instance_data_dir {tmp_path}/pictures,")
        assert not output.exists()
