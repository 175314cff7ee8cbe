"""--init_lora: the settings that follow from a file, what is refused, and the weights that a run starts with."""

import dataclasses

import numpy as np
import program
import pytest

from flux_db.lora import init_lora
from flux_db.lora.convert import name_tensors
from flux_db.lora.lora_file import Layer
from flux_db.settings import lora_layers
from flux_db.settings.command_line import read_config
from flux_db.settings.schema import LoraConfig
from flux_db.weight_file import to_bytes

WIDTH = 12
Q, K = "transformer_blocks.0.attn.to_q", "single_transformer_blocks.3.attn.to_q"
TEXT = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"


def layer(rank, strength=1.0, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    down, up = rng.standard_normal((rank, WIDTH)), rng.standard_normal((WIDTH, rank))
    return Layer(down.astype(dtype), up.astype(dtype), strength * rank, "F32")


def write(path, layers):
    path.write_bytes(to_bytes(name_tensors(layers, "diffusers"), {"format": "pt"}))
    return str(path)


def given(tmp_path, file, *flags):
    words = ["--pretrained_model_name_or_path", "owner/model", "--instance_data_dir", str(tmp_path)]
    words += ["--instance_prompt", "a dog", "--output_dir", str(tmp_path / "out"), "--init_lora", file]
    return init_lora.resolve(read_config([*words, *flags]))


# --- settings ----------------------------------------------------------------------------------------------------


def test_rank_alpha_and_layers_are_the_files(tmp_path):
    file = write(tmp_path / "a.safetensors", {Q: layer(4, 0.5), K: layer(4, 0.5)})
    found = given(tmp_path, file)
    lora = found.config.lora
    assert found.problems == () and (lora.rank, lora.alpha, lora.lora_rank_pattern) == (4, 2.0, ())
    assert lora.lora_layers == "attn.to_q,double:0,single:3"
    assert lora_layers.chosen(lora, [Q, K, "transformer_blocks.1.attn.to_q", "transformer_blocks.0.attn.to_k"]) == [
        Q,
        K,
    ]


def test_what_is_given_counts(tmp_path):
    file = write(tmp_path / "a.safetensors", {Q: layer(4, 0.5)})
    lora = given(tmp_path, file, "--lora_alpha", "8", "--lora_layers", "attention", "--rank", "4").config.lora
    assert (lora.rank, lora.alpha, lora.lora_layers) == (4, 8.0, "attention")


def test_a_stored_config_gives_the_same_settings_again(tmp_path):
    from flux_db.settings.command_line import to_yaml

    file = write(tmp_path / "a.safetensors", {Q: layer(4), K: layer(2)})
    first = given(tmp_path, file)
    (tmp_path / "config.yaml").write_text(to_yaml(first.config))
    assert init_lora.resolve(read_config(["--config", str(tmp_path / "config.yaml")])).config == first.config


def test_several_ranks_become_a_pattern(tmp_path):
    layers = {Q: layer(4), K: layer(2), "transformer_blocks.1.attn.to_q": layer(4)}
    lora = given(tmp_path, write(tmp_path / "a.safetensors", layers)).config.lora
    assert lora.rank == 4 and lora.lora_rank_pattern == (r"^single_transformer_blocks\.3\.attn\.to_q=2",)
    assert {name: lora_layers.rank_of(lora, name) for name in layers} == {n: v.rank for n, v in layers.items()}


def test_ranks_of_a_yaml_file_give_way_to_the_files_and_typed_ones_do_not(tmp_path):
    """As in the configs of the repository, which all have a rank. What fits stays, so a stored config is the same."""
    layers = {Q: layer(4), K: layer(2), "transformer_blocks.1.attn.to_q": layer(4)}
    file = write(tmp_path / "a.safetensors", layers)
    (tmp_path / "config.yaml").write_text("rank: 16\nlora_alpha: 16\n")
    words = ["--config", str(tmp_path / "config.yaml")]
    found = given(tmp_path, file, *words)
    lora, fresh = found.config.lora, given(tmp_path, file).config.lora
    assert found.problems == () and lora == fresh and (lora.rank, lora.alpha) == (4, 4.0)
    note = (
        f"--init_lora {file}: the run has the file's ranks, 2 and 4, and not what the YAML file says (lora_alpha: 16.0,"
    )
    assert [text[: len(note)] for text in found.notes] == [note]
    (problem,) = given(tmp_path, file, *words, "--rank", "4").problems
    assert "leave --rank out, so that all ranks are the file's, or add --init_lora_resize" in problem
    resized = given(tmp_path, file, *words, "--init_lora_resize")
    assert (resized.problems, resized.notes, resized.config.lora.rank) == ((), (), 16)
    (tmp_path / "config.yaml").write_text('rank: 4\nlora_alpha: 8\nlora_rank_pattern: "single.*=2"\n')
    stays = given(tmp_path, file, *words)
    assert (stays.problems, stays.notes, stays.config.lora.alpha) == ((), (), 8.0)


def test_check_says_that_the_ranks_are_the_files(world, tmp_path):
    (tmp_path / "config.yaml").write_text("rank: 16\n")
    file = write(tmp_path / "a.safetensors", {Q: layer(4), K: layer(2)})
    settings = world.settings(tmp_path / "out", pretrained_model_name_or_path="owner/model", init_lora=file)
    settings = {name: value for name, value in settings.items() if name not in ("rank", "lora_layers")}
    settings["config"] = tmp_path / "config.yaml"
    done = program.run(program.command("check", *program.flags(settings)))
    assert done.returncode == 0, done.stderr
    assert "the run has the file's ranks, 2 and 4, and not what the YAML file says (rank: 16)" in done.stdout


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([f"transformer_blocks.{i}.{n}" for i in range(3) for n in lora_layers.DEFAULT_LAYERS], None),
        (
            [f"transformer_blocks.{i}.{n}" for i in (0, 1, 2, 5) for n in lora_layers.ATTENTION_LAYERS],
            "attention,double:0-2,5",
        ),
        ([f"single_transformer_blocks.{i}.proj_out" for i in (7, 12, 16, 20)], "proj_out,single:7,12,16,20"),
        ([Q, "x_embedder"], "attn.to_q,x_embedder"),
    ],
)
def test_layers_in_words(names, text):
    assert init_lora.described(names) == text
    assert all(lora_layers.parse(text).takes(name) for name in names)


def test_clips_rank_and_layers_are_the_files(tmp_path):
    layers = {Q: layer(4), TEXT: layer(2), TEXT.replace("self_attn.q_proj", "mlp.fc1"): layer(2)}
    text = given(tmp_path, write(tmp_path / "a.safetensors", layers), "--train_text_encoder").config.text_encoder
    assert (text.text_encoder_rank, text.layers) == (2, ("q_proj", "fc1"))


# --- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "flags", "why"),
    [
        ({Q: layer(4)}, ["--rank", "8"], "has rank 4, and this run's is 8; leave --rank out, so that all ranks"),
        ({Q: layer(4)}, ["--lora_rank_pattern", "to_q=2"], "this run's is 2; leave --lora_rank_pattern out"),
        ({Q: layer(4), K: layer(4)}, ["--lora_layers", "single:3"], f"has a LoRA on {Q}, which --lora_layers does not"),
        ({Q: layer(4), TEXT: layer(4)}, [], "has layers of CLIP, which is not trained"),
        ({Q: layer(4)}, ["--train_text_encoder"], "has no layers of CLIP for --train_text_encoder"),
        ({TEXT: layer(4)}, ["--train_text_encoder"], "has no layers of FLUX.1's transformer"),
        ({Q: layer(4), TEXT: layer(2)}, ["--train_text_encoder", "--text_encoder_rank", "3"], "leave --text_encoder_r"),
        ({Q: layer(4), K: layer(2)}, ["--rank", "4"], f"its LoRA on {K} has rank 2, and this run's is 4; leave --rank"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path, layers, flags, why):
    (problem,) = given(tmp_path, write(tmp_path / "a.safetensors", layers), *flags).problems
    assert problem.startswith(f"--init_lora {tmp_path}") and why in problem and problem.flag == "init_lora"


@pytest.mark.parametrize(
    ("layers", "flags"),
    [
        ({Q: layer(4)}, ["--rank", "8", "--init_lora_resize"]),
        ({Q: layer(4), TEXT: layer(4)}, ["--init_lora_transformer_only"]),
        ({Q: layer(4)}, ["--train_text_encoder", "--init_lora_transformer_only"]),
        ({Q: layer(4), TEXT: layer(4)}, ["--train_text_encoder"]),
    ],
)
def test_what_was_told_is_accepted(tmp_path, layers, flags):
    assert given(tmp_path, write(tmp_path / "a.safetensors", layers), *flags).problems == ()


def test_a_file_that_is_none_is_a_problem_beside_others(tmp_path):
    (problem,) = given(tmp_path, str(tmp_path / "nothing.safetensors")).problems
    assert problem.startswith(f"--init_lora {tmp_path}") and "no such file" in problem
    (tmp_path / "text.safetensors").write_text("no tensors")
    found = given(tmp_path, str(tmp_path / "text.safetensors"), "--rank", "many").problems
    assert {p.flag for p in found} == {"rank", "init_lora"}


def test_a_file_in_the_output_folder_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (problem,) = given(tmp_path, write(tmp_path / "out" / "a.safetensors", {Q: layer(4)})).problems
    assert "lies in --output_dir, whose content a new run sets aside" in problem


def test_a_lora_for_another_model_is_refused(world, tmp_path):
    file = write(tmp_path / "a.safetensors", {Q: layer(4)})
    words = ["--pretrained_model_name_or_path", str(world.model), "--instance_data_dir", str(tmp_path)]
    (problem,) = init_lora.resolve(read_config([*words, "--instance_prompt", "x", "--init_lora", file])).problems
    assert "does not fit" in problem and "(12, 12) in the LoRA" in problem


# --- weights -----------------------------------------------------------------------------------------------------


def start(layers, lora, ranks):
    """First weights for layers of these ranks."""
    names, fresh = [], []
    for number, (name, rank) in enumerate(sorted(ranks.items())):
        names += [f"{name}.lora_A", f"{name}.lora_B"]
        fresh += [layer(rank, seed=100 + number).down, np.zeros((WIDTH, rank), np.float32)]
    found = init_lora.start_weights(layers, lora, names, fresh)
    return found, dict(zip(names, found.values, strict=True)), dict(zip(names, fresh, strict=True))


def delta(values, name, strength):
    return strength * values[f"{name}.lora_B"] @ values[f"{name}.lora_A"]


def test_the_files_weights_are_taken_bit_for_bit_and_other_layers_start_afresh():
    one = layer(4, 0.5)
    found, values, fresh = start({Q: one}, LoraConfig(rank=4, lora_alpha=2), {Q: 4, K: 4})
    assert (found.taken, found.resized, found.error) == (1, 0, 0.0)
    assert np.array_equal(values[f"{Q}.lora_A"], one.down) and np.array_equal(values[f"{Q}.lora_B"], one.up)
    assert all(np.array_equal(values[f"{K}.lora_{m}"], fresh[f"{K}.lora_{m}"]) for m in "AB")


def test_another_alpha_does_not_change_what_the_lora_does():
    one = layer(4, 0.5)
    _, values, _ = start({Q: one}, LoraConfig(rank=4, lora_alpha=8), {Q: 4})
    np.testing.assert_allclose(delta(values, Q, 2.0), one.delta(), rtol=1e-6)
    assert np.array_equal(values[f"{Q}.lora_A"], one.down)


def test_a_larger_rank_does_the_same_and_can_learn():
    one = layer(4, 0.5)
    found, values, fresh = start({Q: one}, LoraConfig(rank=6), {Q: 6})
    assert (found.taken, found.resized) == (1, 1) and found.error < 1e-6
    np.testing.assert_allclose(delta(values, Q, 1.0), one.delta(), atol=1e-5)
    assert (
        np.array_equal(values[f"{Q}.lora_A"][4:], fresh[f"{Q}.lora_A"][4:]) and not values[f"{Q}.lora_B"][:, 4:].any()
    )


def test_a_smaller_rank_is_the_nearest_and_its_error_is_known():
    one, two = layer(4), layer(4, seed=1)
    found, values, _ = start({Q: one, K: two}, LoraConfig(rank=2, lora_alpha=4), {Q: 2, K: 2})
    lost = total = 0.0
    for name, old in ((Q, one), (K, two)):
        u, s, v = np.linalg.svd(old.delta().astype(np.float64))
        np.testing.assert_allclose(delta(values, name, 2.0), (u[:, :2] * s[:2]) @ v[:2], atol=1e-4)
        lost, total = lost + (s[2:] ** 2).sum(), total + (s**2).sum()
    assert found.resized == 2 and found.error == pytest.approx(np.sqrt(lost / total), rel=1e-5)


def test_half_precision_is_read():
    one = layer(4, dtype=np.float16)
    _, values, _ = start({Q: one}, LoraConfig(rank=4), {Q: 4})
    assert values[f"{Q}.lora_A"].dtype == np.float32 and np.array_equal(
        values[f"{Q}.lora_B"], one.up.astype(np.float32)
    )


def test_the_name_says_no_place(tmp_path):
    file = write(tmp_path / "dog.safetensors", {Q: layer(4)})
    config = given(tmp_path, file).config
    content = init_lora.fingerprint(config)["init_lora_fingerprint"]
    assert init_lora.name_of(config, content) == f"dog.safetensors, sha256 {content}" and len(content) == 16
    none = dataclasses.replace(config, lora=LoraConfig())
    assert init_lora.fingerprint(none) == {} and init_lora.name_of(none, content) is None
