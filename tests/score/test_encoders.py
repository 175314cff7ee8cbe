"""DINOv2 and CLIP of a folder, compared with torch and transformers; and folders that are refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scoring_models import NETWORKS, PROMPTS, pictures, write_clip, write_dino
from transformers import BitImageProcessor, CLIPImageProcessor

from flux_db.errors import UserError
from flux_db.model import picture_processor, scoring_folder
from flux_db.model.dinov2 import bicubic
from flux_db.model.expected_weights import expected_weights
from flux_db.score import encoders
from flux_db.score.measures import unit_rows

TORCH = json.loads(Path(__file__).with_name("torch_features.json").read_text())


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("models") / "clip")


@pytest.fixture(scope="module")
def dino_folder(tmp_path_factory):
    return write_dino(tmp_path_factory.mktemp("models") / "dino")


def assert_same(features, wanted):
    """To what Pillow's rounding makes of it: version 12, the last for Python 3.10, resizes a few pixels otherwise."""
    error = np.abs(features - unit_rows(np.array(wanted))).max()
    print(f"features {error:.1e}")
    assert features.shape == np.shape(wanted) and error <= 1e-3
    assert np.abs(features - features.mean(axis=0)).max() > 0.05, "pictures differ"


@pytest.mark.parametrize("name", NETWORKS)
def test_dinov2_is_that_of_torch(cpu, tmp_path, name):
    assert_same(encoders.dinov2(write_dino(tmp_path / name, *NETWORKS[name]))(pictures()), TORCH[name])


def test_clip_is_that_of_torch(cpu, clip_folder):
    of_pictures, of_texts = encoders.clip(clip_folder)
    assert_same(of_pictures(pictures()), TORCH["clip"])
    assert_same(of_texts(PROMPTS), TORCH["texts"])
    # more than a group, and pictures that were seen before
    again = of_pictures([*pictures(), *pictures()[::-1]])
    np.testing.assert_allclose(again[5:], again[:5][::-1], atol=1e-12)


PROCESSINGS = {
    "shortest edge": {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 24}, "resample": 3},
    "crop larger than the picture": {"size": {"shortest_edge": 16}, "crop_size": 32, "resample": 2},
    "whole": {"size": {"height": 30, "width": 50}, "do_center_crop": False, "resample": 2},
    "neither mean nor crop": {"size": 20, "do_normalize": False, "crop_size": 16, "rescale_factor": 0.01},
    "as it is": {"do_resize": False, "crop_size": 16},
}


@pytest.mark.parametrize("name", PROCESSINGS)
@pytest.mark.parametrize(("network", "processor"), [("dinov2", BitImageProcessor), ("clip", CLIPImageProcessor)])
def test_pictures_are_prepared_as_transformers_does_it(tmp_path, name, network, processor):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSINGS[name]))
    processing = picture_processor.read(tmp_path, network)
    for picture in pictures():
        wanted = processor.from_pretrained(tmp_path)(picture, return_tensors="np").pixel_values[0]
        got = picture_processor.prepare(picture, processing)
        assert got.dtype == np.float32 and got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_without_a_file_a_picture_is_prepared_as_the_published_networks_do_it(tmp_path):
    dino = picture_processor.read(tmp_path, "dinov2")
    assert (dino.shortest_edge, dino.crop, dino.resample) == (256, (224, 224), 3)
    clip = picture_processor.read(tmp_path, "clip")
    assert (clip.shortest_edge, clip.crop, clip.mean[0]) == (224, (224, 224), 0.48145466)


def test_bicubic_weights_sum_to_one_and_keep_what_stays():
    np.testing.assert_allclose(bicubic(37, 16).sum(axis=1), 1.0)
    np.testing.assert_allclose(bicubic(5, 5), np.eye(5))


# ---- folders that are refused ----


def edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def without(folder, tensor):
    weights = load_file(folder / "model.safetensors")
    del weights[tensor]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_missing_weights_are_refused_by_name(cpu, tmp_path):
    folder = write_dino(tmp_path / "dino")
    without(folder, "encoder.layer.1.layer_scale2.lambda1")
    (problem,) = scoring_folder.problems(folder, "dinov2")
    assert "lacks 1 of the" in problem and "encoder.layer.1.layer_scale2.lambda1" in problem
    with pytest.raises(UserError, match=r"layer_scale2\.lambda1"):
        encoders.dinov2(folder)
    folder = write_clip(tmp_path / "clip")
    without(folder, "visual_projection.weight")
    with pytest.raises(UserError, match=r"visual_projection\.weight"):
        encoders.clip(folder)


@pytest.mark.parametrize(
    ("break_it", "network", "problem"),
    [
        (lambda f: (f / "config.json").unlink(), "clip", "config.json is missing; a folder with a CLIP has it"),
        (lambda f: edit(f / "config.json", model_type="vit"), "clip", "is of a 'vit', not of a CLIP (clip)"),
        (lambda f: None, "dinov2", "is of a 'clip', not of a DINOv2 (dinov2)"),
        (lambda f: (f / "model.safetensors").unlink(), "clip", "has no weights (model.safetensors or"),
        (lambda f: (f / "merges.txt").unlink(), "clip", "has no vocabulary (merges.txt)"),
        (lambda f: edit(f / "preprocessor_config.json", crop_size=-1), "clip", "crop_size -1: must be a whole number"),
        (
            lambda f: edit(f / "preprocessor_config.json", crop_size=24),
            "clip",
            "makes 24x24, but config.json wants 32x32",
        ),
        (lambda f: edit(f / "preprocessor_config.json", image_std=[1, 0, 1]), "clip", "image_std [1, 0, 1]"),
        (lambda f: edit(f / "config.json", vision_config=3), "clip", "vision_config must be an object"),
    ],
)
def test_a_folder_that_does_not_serve_is_refused_in_one_line(tmp_path, break_it, network, problem):
    folder = write_clip(tmp_path / "clip")
    break_it(folder)
    (found,) = scoring_folder.problems(folder, network)
    assert problem in found and "\n" not in found


def test_a_name_is_a_folder_or_one_of_the_hub(tmp_path, dino_folder):
    assert scoring_folder.locate(str(dino_folder), "--dino", "dinov2") == dino_folder
    assert scoring_folder.name_problem("facebook/dinov2-base") is None
    for name, problem in (
        (str(tmp_path / "nowhere"), "no such folder; check the path"),
        ("a b", "neither a folder nor a name on the hub"),
        (__file__, "is a file; give the folder"),
    ):
        with pytest.raises(UserError, match=problem):
            scoring_folder.locate(name, "--dino", "dinov2")


def test_the_hub_out_of_reach_is_one_line(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(*_, **__):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UserError, match=r"--clip owner/clip: .* cannot be fetched from the hub \(LocalEntryNot"):
        scoring_folder.locate("owner/clip", "--clip", "clip")


def count(network, config):
    return sum(math.prod(shape) for shape in expected_weights(network, config).values())


def test_the_published_networks_have_as_many_parameters_as_is_known():
    base = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 518}
    giant = {"hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24, "use_swiglu_ffn": True}
    assert count("dinov2", base) == 86_580_480
    assert count("dinov2", giant | {"image_size": 518}) == 1_136_480_768
    text, vision = {"hidden_size": 512, "intermediate_size": 2048}, {"hidden_size": 768, "patch_size": 32}
    assert count("clip", {"text_config": text, "vision_config": vision}) == 151_277_313
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    config = {"text_config": text, "vision_config": vision | {"patch_size": 14}, "projection_dim": 768}
    assert count("clip", config) == 427_616_513
