"""Bases that are not FLUX.1-dev: no guidance embedding, a scheduler of fixed shift, weights of a merged model."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from world import World, lora_bytes, metrics, train

from flux_db.check.model import check_model, model_warnings
from flux_db.lora import merge
from flux_db.model import loading
from flux_db.model.sampler import sampling_schedule

RUN = {
    "lora_layers": "single_transformer_blocks.0.attn.to_q",
    "max_train_steps": 2,
    "checkpointing_steps": 1,
    "validation_prompt": ("a dog",),
    "num_validation_images": 1,
    "validation_inference_steps": 2,
    "validation_steps": 2,
}


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def schnell(world, tmp_path_factory):
    """The tiny model as FLUX.1-schnell is: without guidance embedding, and with the shift 1 for every size."""
    folder = tmp_path_factory.mktemp("schnell")
    shutil.copytree(world.model, folder / "model")
    shutil.copytree(world.pictures, folder / "pictures")
    edit(folder / "model/transformer/config.json", guidance_embeds=False)
    edit(folder / "model/scheduler/scheduler_config.json", use_dynamic_shifting=False, shift=1.0)
    weights = folder / "model/transformer/diffusion_pytorch_model.safetensors"
    kept = {name: value for name, value in load_file(weights).items() if "guidance_embedder" not in name}
    save_file(kept, weights, {"format": "pt"})
    return World(folder)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_scheduler_of_fixed_shift_moves_the_noise_levels(schnell, tmp_path, shift):
    """sigma = s t / (1 + (s - 1) t), the same for every size; for training and for samples."""
    model = tmp_path / "model"
    shutil.copytree(schnell.model / "scheduler", model / "scheduler")
    edit(model / "scheduler/scheduler_config.json", shift=shift)
    sigmas, timesteps = loading.training_table(model)
    t = np.arange(1000, 0, -1) / 1000
    np.testing.assert_allclose(sigmas, shift * t / (1 + (shift - 1) * t), rtol=1e-5)
    np.testing.assert_allclose(timesteps, sigmas, rtol=1e-5)
    drawn = [sampling_schedule(loading.load_scheduler(model), 4, tokens)[1] for tokens in (256, 4096)]
    t = np.array([1, 0.75, 0.5, 0.25])
    np.testing.assert_allclose(drawn[0], [*(shift * t / (1 + (shift - 1) * t)), 0], rtol=1e-5)
    assert np.array_equal(*drawn)


def test_a_model_without_guidance_is_sound_and_says_what_it_does_not_use(schnell, world, tmp_path):
    config = schnell.config(tmp_path)
    assert check_model(schnell.model, config) == [] and model_warnings(config) == []
    (warning,) = model_warnings(schnell.config(tmp_path, guidance_scale=3.5))
    assert warning.startswith("--guidance_scale 3.5: not used, because the model has no guidance embedding")
    assert model_warnings(world.config(tmp_path, guidance_scale=3.5)) == []
    assert model_warnings(schnell.config(tmp_path, pretrained_model_name_or_path="owner/model")) == []


def test_a_class_held_at_another_guidance_than_it_is_drawn_at_is_a_warning(schnell, world, tmp_path):
    """At guidance 1 alone, with all layers trained, it became a grey ghost at 3.5 (docs/evidence.md)."""
    (warning,) = model_warnings(world.config(tmp_path, preserve_class="dog"))
    assert warning.endswith("there it may turn grey; train with --guidance_scale 3.5")
    assert model_warnings(world.config(tmp_path, preserve_class="dog", guidance_scale=3.5)) == []
    assert model_warnings(world.config(tmp_path, preserve_class="dog", validation_guidance=1.0)) == []
    assert model_warnings(schnell.config(tmp_path, preserve_class="dog")) == []


def test_a_run_with_samples_on_a_model_without_guidance_resumes_exactly(cpu, schnell, tmp_path):
    assert train(schnell.config(tmp_path / "run", **RUN)) == 0
    assert [row["step"] for row in metrics(tmp_path / "run") if "loss" in row] == [1, 2]
    assert len(list((tmp_path / "run" / "samples").glob("step-*/*.png"))) == 2
    start = str(tmp_path / "run" / "checkpoint-1")
    assert train(schnell.config(tmp_path / "more", **RUN, resume_from_checkpoint=start)) == 0
    assert lora_bytes(tmp_path / "more") == lora_bytes(tmp_path / "run")


def test_a_merged_model_is_a_base(cpu, world, schnell, tmp_path):
    """What `fuse` writes, with a LoRA trained on a relative, is checked, loaded and trained."""
    settings = RUN | {"validation_prompt": (), "checkpointing_steps": 1000}
    assert train(schnell.config(tmp_path / "run", **settings)) == 0
    merge.fuse(
        world.model, [merge.Weighted(tmp_path / "run" / "pytorch_lora_weights.safetensors")], tmp_path / "merged"
    )
    config = world.config(tmp_path / "more", **settings, pretrained_model_name_or_path=str(tmp_path / "merged"))
    assert check_model(tmp_path / "merged", config) == []
    assert train(config) == 0 and len(metrics(tmp_path / "more")) == 2
