"""`plan`: the formulas, by numbers that are known from elsewhere, and what the command prints."""

import json
from dataclasses import replace

import pytest
from program import command, flags, run

from flux_db.check import device_memory
from flux_db.check.device_memory import ENCODING, SAMPLES, TRAINING, budget, read_model
from flux_db.check.remedies import remedies
from flux_db.settings.schema import from_flat_dict
from flux_db.size import Size

GB = 10**9
TOKENS = {512: 512 + 32 * 32, 1024: 512 + 64 * 64}
# Bytes of a [tokens, 3072] tensor in bf16.
ONE = {side: tokens * 3072 * 2 for side, tokens in TOKENS.items()}


def config(**changes):
    needed = {"pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev", "instance_data_dir": "-"}
    return from_flat_dict(needed | {"instance_prompt": "a photo of sks dog", "mixed_precision": "bf16"} | changes)


def rows(devices=1, stage=TRAINING, **changes):
    found = budget(config(**changes), read_model(config(**changes)), devices)
    return {item.name: item.bytes for item in found.of(stage)}


def test_weights_lora_and_optimizer_of_flux_dev():
    assert rows()["transformer"] == 11_901_408_320 * 2
    # the matrices of the blocks are all but 0.6 % of it; a scale for each row
    assert rows(base_precision="int8")["transformer"] == pytest.approx(11.97 * GB, rel=0.001)
    assert rows(devices=8, shard_base=True)["transformer"] == pytest.approx(23.8 * GB / 8, rel=0.003)  # vectors whole
    assert rows(devices=8, shard_base=True, base_precision="int8")["transformer"] == pytest.approx(1.5 * GB, rel=0.01)
    lora = 44_826_624  # rank 16 in diffusers' default layers
    assert rows()["LoRA"] == lora * (4 + 2) and rows(rank=32)["LoRA"] == 2 * lora * (4 + 2)
    assert rows()["optimizer"] == lora * 8
    assert rows(optimizer="prodigy", ema_decay=0.99, gradient_accumulation_steps=2)["optimizer"] == lora * 4 * 6
    assert rows(lora_layers="all")["LoRA"] == pytest.approx(85.9e6 * 6, rel=0.001)


@pytest.mark.parametrize("side", [512, 1024])
def test_kept_activations(side):
    # with all blocks computed again only their inputs and the last result are kept, and the rotary tables
    kept = rows(resolution=side, gradient_checkpointing="blocks")["kept activations"]
    end = (TOKENS[side] - 512) * 3072 * 2
    assert kept == pytest.approx(57 * ONE[side] + end + 2 * TOKENS[side] * 128 * 4, rel=1e-6)
    whole = rows(resolution=side)["kept activations"]
    assert whole == pytest.approx((19 * 19 + 38 * 16) * ONE[side], rel=0.03)
    # some blocks, the first ones
    some = rows(resolution=side, gradient_checkpointing="10")["kept activations"]
    assert whole - some == pytest.approx(10 * 18 * ONE[side], rel=0.03)
    assert kept < rows(resolution=side, gradient_checkpointing="attention")["kept activations"] < whole
    assert rows(resolution=side, train_batch_size=4)["kept activations"] == pytest.approx(4 * whole, rel=0.01)
    # the result of --preserve_class has three times the rows, class pictures twice
    assert rows(resolution=side, preserve_class="dog")["kept activations"] == pytest.approx(3 * whole, rel=0.01)


def test_stages_have_what_is_in_memory_then():
    plain = budget(config(), read_model(config()), 1)
    assert plain.stages == [TRAINING, ENCODING], "without prompts nothing is drawn"
    assert "T5 and CLIP, or the VAE" not in {item.name for item in plain.of(TRAINING)}
    drawn = rows(stage=SAMPLES, validation_prompt=["a dog"], validation_size="1024x1024")
    assert drawn["sampler, or VAE decode"] == 4 * 256 * 1024**2 * 4
    assert rows(stage=ENCODING)["T5 and CLIP, or the VAE"] == pytest.approx(9.97 * GB, rel=0.01)
    assert "all-reduce" in rows(devices=8) and "all-reduce" not in rows()
    assert "CLIP" in rows(train_text_encoder=True) and "VAE" in rows(cache_latents=False)


def test_what_would_make_it_fit_comes_in_the_order_of_its_price():
    given = config(resolution=1024, train_batch_size=4)
    model = read_model(given)
    assert not budget(given, model, 8).fits(32)
    found = remedies(given, model, 8, 32)
    assert [remedy.flags.split()[0] for remedy in found] == ["--gradient_checkpointing", "--train_batch_size"]
    assert [remedy.peak for remedy in found] == sorted((remedy.peak for remedy in found), reverse=True)
    assert found[-1].peak <= 32 * GB
    # a card of 24 GB needs int8, one of 16 GB more than that; what is not there is not offered
    assert [r.flags for r in remedies(given, model, 1, 24)][2:] == ["--base_precision int8"]
    assert "--shard_base" in [r.flags for r in remedies(given, model, 8, 10)]
    assert "--shard_base" not in [r.flags for r in remedies(given, model, 1, 10)]
    assert remedies(config(gradient_checkpointing="blocks"), model, 1, 64) == []


def test_the_largest_size_of_the_pictures_counts():
    given = config(gradient_checkpointing="blocks")
    model = read_model(given)
    buckets = [Size(512, 512), Size(1024, 1024), Size(256, 512)]
    large = config(gradient_checkpointing="blocks", resolution=1024)
    assert budget(given, model, 1, buckets).total(TRAINING) == budget(large, model, 1).total(TRAINING)


def plan(*words):
    return run(command("plan", *words))


def test_the_command_needs_no_model_and_says_whether_it_fits():
    done = plan("--config", "configs/flux_dev_64gb.yaml", "--card", "64")
    assert done.returncode == 0, done.stderr
    assert "Sizes: FLUX.1-dev's, because the model is not a folder here" in done.stdout
    assert "A card with 64 GB: fits, " in done.stdout and "Compiling     about 5 to 14 minutes" in done.stdout
    done = plan("--mixed_precision", "bf16", "--resolution", "1024", "--card", "32")
    assert done.returncode == 1 and "--gradient_checkpointing  " in done.stdout, done.stderr
    done = plan("--card", "none", "--rank", "0")
    assert done.returncode == 2


def test_the_command_reads_the_config_of_a_model_that_is_here_and_prints_json(world):
    done = plan("--pretrained_model_name_or_path", world.model, "--resolution", "32", "--cards", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sizes_of"] == str(world.model) and found["devices"] == 2 and found["fits"]
    given = replace(config(), model=replace(config().model, pretrained_model_name_or_path=str(world.model)))
    assert read_model(given).is_here
    assert (
        found["memory"][TRAINING]["transformer"]
        == 2 * rows(pretrained_model_name_or_path=str(world.model))["transformer"]
    ), "float32, where the settings above are bf16"


def test_check_and_its_plan_agree(world, tmp_path):
    settings = world.settings(tmp_path / "out")
    done = run(command("check", *flags(settings)))
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("  device memory "))
    given = world.config(tmp_path / "out")
    assert line.split(maxsplit=2)[2] == device_memory.verdict(given, read_model(given), 1, [Size(32, 32)])
