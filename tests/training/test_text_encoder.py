"""CLIP trained with the transformer: the step, exact resume, samples and validation with the trained CLIP."""

import shutil

import mindspore as ms
import numpy as np
import program
import pytest
from mindspore import Tensor
from PIL import Image
from safetensors.numpy import load
from step_formula import ROWS, call, inputs, loss_in_numpy, make, velocity
from world import PROMPT, lora_bytes, metrics, train

from flux_db.data import encode, encode_cache
from flux_db.errors import UserError
from flux_db.lora import generate, lora_file, merge
from flux_db.model import adapter, loading, optim, text_encoder
from flux_db.model.optim import SecondPart
from flux_db.model.text_encoder import Pooled
from flux_db.settings.derived import text_lora
from flux_db.train_step import TrainStepForFluxDevDB

TEXT = {"train_text_encoder": True, "text_encoder_lr": 1e-2, "text_encoder_rank": 2, "text_encoder_layers": "all"}
LAYERS = "single_transformer_blocks.0.attn.to_q,single_transformer_blocks.0.proj_out"
STOPS = 3
RUN = {
    **TEXT,
    "text_encoder_steps": STOPS,
    "lora_layers": LAYERS,
    "lora_dropout": 0.1,
    "caption_dropout": 0.5,
    "gradient_accumulation_steps": 2,
    "max_train_steps": 4,
    "checkpointing_steps": 2,
}


def test_the_loss_is_that_of_clips_own_vectors_and_dropout_is_the_loras_alone(cpu, world, tmp_path):
    """By the formula in numpy, with prior preservation: the class half has token ids of its own."""
    transformer, settings, _, _ = make(cpu, world, tmp_path, prior_loss_weight=0.7)
    config = world.config(tmp_path, **TEXT)
    clip = loading.load_clip(world.model, ms.float32)
    adapter.inject_text_encoder(clip, text_lora(config), seed=0)
    for name, parameter in adapter.parameters(clip).items():
        if name.endswith("lora_B"):
            parameter.set_data(Tensor(np.full(parameter.shape, 0.05, np.float32)))
    prompts = [PROMPT, "a photo of a dog"]
    ids = encode.clip_token_ids(loading.load_tokenizers(world.model)[0], prompts)
    assert ids.shape == (ROWS, 77)
    values = inputs(48, 32)
    values["pooled"] = np.stack([Pooled(clip).of(row) for row in ids])
    expected = loss_in_numpy(settings, values, velocity(transformer, settings, values), np.ones_like)

    own = [*adapter.parameters(transformer).values()], [*adapter.parameters(clip).values()]
    optimizer = optim.build_optimizer([*own[0], *own[1]], config.optim, second=SecondPart(len(own[1]), 0.0))
    step = TrainStepForFluxDevDB(transformer, optimizer, settings, text_encoder=clip).set_train(True)
    text_encoder.set_training(clip)
    before = optimizer.weights.asnumpy().copy()
    given = values | {"pooled": ids, "lr": np.array([0.0, 1e-2, 1.0], np.float32)}
    loss, norm, applied, *_ = call(step, given)
    assert loss == pytest.approx(expected, rel=1e-6) and applied == 1 and norm > 0
    moved = optimizer.weights.asnumpy() != before
    assert not moved[: -optimizer.second_size].any() and moved[-optimizer.second_size :].mean() > 0.9
    assert call(step, given)[0] < loss, "CLIP alone learns"
    stopped = optimizer.weights.asnumpy().copy()
    small = call(step, given | {"lr": np.array([0.0, 1e-2, 0.0], np.float32)})[1]
    assert np.array_equal(optimizer.weights.asnumpy(), stopped) and 0 < small < norm


@pytest.mark.parametrize("eos", [2, 49407])
def test_the_vector_is_read_where_transformers_reads_it(cpu, eos):
    """At the highest token id by CLIP-L's own settings, otherwise at the first end of the text."""
    ids = np.array([[49406, 320, 49407, 49407], [49406, 49407, 0, 0]], np.int32)
    hidden = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)

    class Hidden(ms.nn.Cell):
        def construct(self, ids, return_dict=False):
            return (Tensor(hidden),)

    class Vectors(ms.nn.Cell):
        def __init__(self):
            super().__init__()
            self.model = Hidden()

        def construct(self, ids):
            return text_encoder.clip_vectors(self.model, ids, eos)

    assert np.array_equal(Vectors()(Tensor(ids)).asnumpy(), hidden[[0, 1], [2, 1]])


@pytest.fixture(scope="module")
def whole(cpu, world, tmp_path_factory):
    """Four steps, CLIP in the first three; with dropouts and accumulation."""
    output = tmp_path_factory.mktemp("whole") / "run"
    assert train(world.config(output, **RUN)) == 0
    return output


def parts(data):
    tensors = load(data)
    text = {name: value for name, value in tensors.items() if name.startswith("text_encoder.")}
    return text, {name: value for name, value in tensors.items() if name not in text}


def test_a_run_trains_both_and_stops_with_clip_when_asked(whole):
    text, rest = parts(lora_bytes(whole))
    assert len(text) == 2 * 6 * 2 and len(rest) == 4 and all(name.startswith("transformer.") for name in rest)
    assert all(np.abs(value).max() > 0 for value in {**text, **rest}.values())
    rates = [row["text_encoder_lr"] for row in metrics(whole) if "loss" in row]
    assert rates == [pytest.approx(1e-2)] * STOPS + [0.0]
    halfway = parts((whole / "checkpoint-2" / "pytorch_lora_weights.safetensors").read_bytes())
    assert any(not np.array_equal(text[name], value) for name, value in halfway[0].items()), "step 3 trains CLIP"


def test_a_resume_is_exact(whole, world, tmp_path):
    """From step 2, through the step in which CLIP stops."""
    more = world.config(tmp_path / "run", **RUN, resume_from_checkpoint=str(whole / "checkpoint-2"))
    assert train(more) == 0
    assert lora_bytes(tmp_path / "run") == lora_bytes(whole)
    state = "checkpoint-4/optimizer.safetensors"
    assert (tmp_path / "run" / state).read_bytes() == (whole / state).read_bytes()


def test_clip_stays_as_it_is_after_its_steps(whole, world, tmp_path):
    assert train(world.config(tmp_path / "run", **RUN | {"max_train_steps": STOPS})) == 0
    early, late = parts(lora_bytes(tmp_path / "run")), parts(lora_bytes(whole))
    assert all(np.array_equal(early[0][name], value) for name, value in late[0].items())
    assert any(not np.array_equal(early[1][name], value) for name, value in late[1].items())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"train_text_encoder": False}, "--train_text_encoder: .* has weights for the text encoder too"),
        ({"text_encoder_rank": 3}, "--text_encoder_rank: the weights in .* are of rank 2"),
        ({"text_encoder_layers": "q_proj"}, "--text_encoder_layers: .* has weights for text_model.* too"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(whole, world, tmp_path, changes, text):
    settings = {**RUN, **changes, "allow_changed": tuple(changes)}
    settings = settings if settings["train_text_encoder"] else {k: v for k, v in settings.items() if k[:5] != "text_"}
    with pytest.raises(UserError, match=text):
        train(world.config(tmp_path / "run", **settings, resume_from_checkpoint=str(whole / "checkpoint-2")))


def test_a_checkpoint_without_clip_is_refused(world, tmp_path):
    plain = {"lora_layers": LAYERS, "max_train_steps": 2, "checkpointing_steps": 2}
    assert train(world.config(tmp_path / "plain", **plain)) == 0
    start = str(tmp_path / "plain" / "checkpoint-2")
    flags = {**plain, **TEXT, "max_train_steps": 4, "resume_from_checkpoint": start}
    with pytest.raises(UserError, match="these change the result"):
        train(world.config(tmp_path / "run", **flags))
    with pytest.raises(UserError, match=r"--train_text_encoder: .* has no weights for the text encoder"):
        train(world.config(tmp_path / "run", **flags, allow_changed=("train_text_encoder",)))


def test_an_older_cache_is_completed_with_tokens_and_t5_is_not_loaded(cpu, world, tmp_path):
    """Files are stored by content, so an older cache lacks the tokens and holds nothing that is wrong."""
    config = world.config(tmp_path / "run", **TEXT, encode_cache_dir=str(tmp_path / "cache"))
    cache = encode_cache.open_cache(config, world.model)
    cache.folder.mkdir()
    cache.write(cache.prompt_file(PROMPT), {"prompt_embeds": np.zeros((16, 48)), "pooled_prompt_embeds": np.zeros(32)})
    dataset = encode.Dataset(examples=())
    work = encode.missing(world.config(tmp_path, validation_prompt=(PROMPT,), **TEXT), cache, dataset)
    assert work.prompts == () and work.tokens == (PROMPT,) and work.describe() == "the tokens of 1 prompt"
    encode._store_tokens(world.model, cache, work.tokens)
    assert cache.read(cache.token_file(PROMPT))["ids"].shape == (77,)


@pytest.fixture(scope="module")
def drawn(world, tmp_path_factory):
    """As a user starts it: class pictures, samples, validation loss; a strong text encoder and a weak transformer."""
    output = tmp_path_factory.mktemp("drawn") / "run"
    held_out = shutil.copytree(world.pictures, output.parent / "held out")
    settings = world.settings(
        output,
        **{**TEXT, "text_encoder_lr": 0.1, "learning_rate": 1e-6, "lora_layers": LAYERS, "max_train_steps": 4},
        with_prior_preservation=True,
        class_data_dir=str(output.parent / "class"),
        class_prompt="a photo of a dog",
        num_class_images=2,
        validation_prompt=PROMPT,
        num_validation_images=1,
        validation_steps=4,
        validation_inference_steps=2,
        validation_data_dir=str(held_out),
    )
    done = program.run(program.trainer(settings), timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "layers of CLIP" in done.stdout + done.stderr
    return output, settings


def picture(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def test_samples_and_validation_loss_are_of_the_trained_clip(drawn):
    output, _ = drawn
    first, last = (picture(output / f"samples/step-{step:05d}/00.png") for step in (0, 4))
    assert np.abs(first - last).max() > 2, "only CLIP has learned"
    losses = [row["validation_loss"] for row in metrics(output) if "validation_loss" in row]
    assert len(losses) == 2 and losses[0] != losses[1]
    assert "| Text encoder (CLIP) | rank 2, alpha 2, learning rate 0.1" in (output / "README.md").read_text()


def test_generate_draws_the_samples_with_clips_lora(drawn, world, tmp_path):
    output, settings = drawn
    words = ["--model", world.model, "--lora", output, "--prompt", PROMPT, "--size", "32x32", "--steps", 2]
    words += ["--max_sequence_length", 16, "--device", "CPU", "--encode_cache_dir", settings["encode_cache_dir"]]
    done = program.run(program.command("generate", *words, "-o", tmp_path / "out"), timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    sample = picture(output / "samples/step-00004/00.png")
    assert np.abs(picture(tmp_path / "out" / "000-00.png") - sample).max() <= 1


def test_merged_or_beside_the_lora_gives_the_same_vectors(whole, cpu, world, tmp_path):
    config = world.config(tmp_path, **RUN)
    ids = encode.clip_token_ids(loading.load_tokenizers(world.model)[0], [PROMPT])[0]
    plain = loading.load_clip(world.model, ms.float32)
    bare = Pooled(plain).of(ids)
    beside = loading.load_clip(world.model, ms.float32)
    adapter.inject_text_encoder(beside, text_lora(config), seed=1)
    adapter.load_state_dict(beside, parts(lora_bytes(whole))[0], adapter.TEXT_ENCODER)
    merged = loading.load_clip(world.model, ms.float32)
    additions = merge.by_part(merge.read_all([merge.Weighted(whole)]))["text_encoder"]
    assert len(additions) == len(lora_file.read(whole).text_layers) == 12
    generate.add_loras(merged, additions, ms.float32)
    found = Pooled(beside).of(ids)
    assert np.abs(Pooled(merged).of(ids) - found).max() <= 1e-5 < np.abs(found - bare).max()
