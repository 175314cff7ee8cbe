"""The small FLUX is the same FLUX to everyone: to the byte on disk, to mindone's classes and to the tokenizers."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file
from transformers import CLIPTokenizer, T5TokenizerFast

from flux_db.demo.pictures import write_demo_pictures
from flux_db.demo.tiny_model import MODEL_INDEX, SCHEMA, WORDS, write_tiny_model
from flux_db.errors import UserError
from flux_db.model.expected_weights import expected_weights

WEIGHTS = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
    "text_encoder_2": "model.safetensors",
}
PROMPT = "a photo of sks dog"


@pytest.fixture(scope="module", params=["tiny", "mid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / request.param
    write_tiny_model(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, "tiny")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weights(model: Path, part: str) -> dict[str, np.ndarray]:
    return load_file(model / part / WEIGHTS[part])


def config(model: Path, part: str) -> dict:
    return json.loads((model / part / "config.json").read_text())


# ---- The model that has learned something ----


def test_the_small_model_is_whole_in_fp16_and_describes_itself(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "small", "small")
    files = contents(tmp_path / "small")
    assert sum(map(len, files.values())) <= 20_000_000
    for part in WEIGHTS:
        found = weights(tmp_path / "small", part)
        assert {name: value.shape for name, value in found.items()} == expected_weights(
            part, config(tmp_path / "small", part)
        )
        assert {value.dtype for value in found.values()} == {np.dtype(np.float16)}
        assert all(np.isfinite(value).all() for value in found.values())
    assert b"How it was trained" in files["README.md"]


# ---- Bytes ----


def test_same_seed_same_bytes(tiny: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "again", "tiny")
    assert contents(tmp_path / "again") == contents(tiny)


def test_another_seed_draws_every_tensor_anew_and_nothing_else(tiny: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "other", "tiny", seed=1)
    before, after = contents(tiny), contents(tmp_path / "other")
    changed = {path for path in before if before[path] != after[path]}
    assert changed == {f"{part}/{file}" for part, file in WEIGHTS.items()} | {"tiny_model.json"}
    for part in WEIGHTS:
        first, second = weights(tiny, part), weights(tmp_path / "other", part)
        assert first.keys() == second.keys()
        assert not any(np.array_equal(first[name], second[name]) for name in first)


def test_the_same_bytes_on_every_machine(tiny: Path) -> None:
    """Whoever changes the recipe on purpose raises SCHEMA and writes the new hash here."""
    digest = hashlib.sha256((tiny / "transformer" / WEIGHTS["transformer"]).read_bytes()).hexdigest()
    assert (SCHEMA, digest) == (1, "d176a34a56ee4bef1be897e3fa2c8bf9f46c45060109f7caa95e9bcfc1122163")


# ---- The model ----


def test_sizes_of_the_transformer(model: Path) -> None:
    low, high = {"tiny": (0.05e6, 0.2e6), "mid": (8e6, 11e6)}[model.name]
    assert low < sum(tensor.size for tensor in weights(model, "transformer").values()) < high
    transformer = config(model, "transformer")
    width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    blocks = (transformer["num_layers"], transformer["num_single_layers"])
    assert (*blocks, width) == {"tiny": (2, 2, 32), "mid": (2, 4, 256)}[model.name]
    assert sum(transformer["axes_dims_rope"]) == transformer["attention_head_dim"]


def test_every_part_of_the_index_is_there(model: Path) -> None:
    index = json.loads((model / "model_index.json").read_text())
    assert index == MODEL_INDEX
    parts = {name for name in index if not name.startswith("_")}
    assert parts == {path.name for path in model.iterdir() if path.is_dir()}


def test_weights_are_torch_files_of_lively_float32(model: Path) -> None:
    for part, file in WEIGHTS.items():
        with safe_open(model / part / file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
        for name, tensor in weights(model, part).items():
            assert tensor.dtype == np.float32, name
            # No tensor is constant: norm gains and biases too would show if they were swapped or left out.
            assert np.isfinite(tensor).all() and tensor.std() > 0, name


@pytest.mark.parametrize("part", WEIGHTS)
def test_mindone_finds_exactly_its_parameters(cpu, model: Path, part: str) -> None:
    loaded = mindone_class(part).from_pretrained(str(model / part))
    parameters = {torch_name(parameter.name): parameter.asnumpy() for parameter in loaded.get_parameters()}
    stored = weights(model, part)
    assert {name: array.shape for name, array in parameters.items()} == {k: v.shape for k, v in stored.items()}
    for name, array in parameters.items():
        np.testing.assert_array_equal(array, stored[name], err_msg=name)


def torch_name(name: str) -> str:
    """MindSpore's older layers, which mindone's CLIP is made of, have names of their own."""
    owner, _, last = name.rpartition(".")
    last = {"embedding_table": "weight", "gamma": "weight", "beta": "bias"}.get(last, last)
    return f"{owner}.{last}"


def mindone_class(part: str) -> type:
    # Not at the top: importing mindone takes seconds that the other tests do not need.
    import mindone.diffusers
    import mindone.transformers

    library, name = MODEL_INDEX[part]
    return getattr({"diffusers": mindone.diffusers, "transformers": mindone.transformers}[library], name)


def test_mindone_schedules_like_flux_dev(cpu, tiny: Path) -> None:
    from mindone.diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(str(tiny / "scheduler"))
    shift = (scheduler.config.base_shift, scheduler.config.max_shift, scheduler.config.shift)
    assert shift == (0.5, 1.15, 3.0)
    assert scheduler.config.use_dynamic_shifting
    assert len(scheduler.timesteps) == 1000


# ---- Tokenizers ----


def clip_tokenizer(model: Path) -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(str(model / "tokenizer"))


def t5_tokenizer(model: Path) -> T5TokenizerFast:
    return T5TokenizerFast.from_pretrained(str(model / "tokenizer_2"))


def test_clip_pieces(tiny: Path) -> None:
    tokenizer = clip_tokenizer(tiny)
    ids = tokenizer(PROMPT).input_ids
    words = ["a</w>", "photo</w>", "of</w>", "sks</w>", "dog</w>"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|startoftext|>", *words, "<|endoftext|>"]
    # CLIP pools at the highest id of the sequence.
    assert np.argmax(ids) == len(ids) - 1
    assert len(tokenizer) == config(tiny, "text_encoder")["vocab_size"] == max(ids) + 1


def test_t5_pieces(tiny: Path) -> None:
    tokenizer = t5_tokenizer(tiny)
    ids = tokenizer(PROMPT).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁a", "▁photo", "▁of", "▁sks", "▁dog", "</s>"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert len(tokenizer) == config(tiny, "text_encoder_2")["vocab_size"]
    assert tokenizer("  a   photo of sks dog ").input_ids == ids


def test_every_word_is_one_token(tiny: Path) -> None:
    clip, t5 = clip_tokenizer(tiny), t5_tokenizer(tiny)
    for word in WORDS.split():
        assert (clip.tokenize(word), t5.tokenize(word)) == ([f"{word}</w>"], [f"▁{word}"])


def test_any_text_can_be_spelled(tiny: Path) -> None:
    text = "zebra №7, (x_t) Ünïcode 🐕"
    clip, t5 = clip_tokenizer(tiny), t5_tokenizer(tiny)
    assert max(clip(text).input_ids) < len(clip) and clip(text).input_ids == clip_tokenizer(tiny)(text).input_ids
    assert max(t5(text).input_ids) < len(t5) and t5(text).input_ids == t5_tokenizer(tiny)(text).input_ids
    assert t5.decode(t5("zebra 7, (x_t)").input_ids, skip_special_tokens=True) == "zebra 7, (x_t)"
    assert clip.unk_token_id not in clip(text).input_ids[1:-1]


@pytest.mark.parametrize(
    ("load", "length", "pad"), [(clip_tokenizer, 77, "<|endoftext|>"), (t5_tokenizer, 512, "<pad>")]
)
def test_padding_and_truncation(tiny: Path, load, length: int, pad: str) -> None:
    tokenizer = load(tiny)
    assert tokenizer.model_max_length == length
    options = {"padding": "max_length", "max_length": length, "truncation": True}
    short = tokenizer(PROMPT, **options).input_ids
    long = tokenizer(PROMPT * 200, **options).input_ids
    assert len(short) == len(long) == length
    unpadded = tokenizer(PROMPT).input_ids
    assert short[: len(unpadded)] == unpadded
    assert set(short[len(unpadded) :]) == {tokenizer.convert_tokens_to_ids(pad)}
    assert long[-1] == tokenizer.eos_token_id


# ---- The folder ----


def test_same_model_again_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model(folder, "tiny")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    write_tiny_model(folder, "tiny")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_an_empty_folder_is_filled_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_tiny_model(tmp_path / "model", "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_missing_parents_are_made(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "a" / "b", "tiny")
    assert (tmp_path / "a" / "b" / "model_index.json").is_file()


def refuse_other_content(folder: Path, *, seed: int = 0) -> None:
    before = contents(folder)
    with pytest.raises(UserError, match=str(folder)):
        write_tiny_model(folder, "tiny", seed=seed)
    assert contents(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_folder_with_other_content_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("the only copy")
    refuse_other_content(folder)


def test_another_model_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model(folder, "tiny")
    refuse_other_content(folder, seed=1)


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model(folder, "tiny")
    (folder / "vae" / WEIGHTS["vae"]).write_bytes(b"")
    refuse_other_content(folder)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    for folder in (file, file / "below"):
        with pytest.raises(UserError, match=str(folder)):
            write_tiny_model(folder, "tiny")
    assert file.read_text() == "not a folder"


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flux_db.atomic.write_durably", disk_full)
    with pytest.raises(UserError, match="No space left"):
        write_tiny_model(tmp_path / "model", "tiny")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tiny, mid, small"):
        write_tiny_model(tmp_path / "model", "huge")


# ---- Demo pictures ----


def test_demo_pictures_are_repeatable_and_differ_from_one_another(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        write_demo_pictures(tmp_path / folder, count=6, size=64)
    first = contents(tmp_path / "first")
    assert first == contents(tmp_path / "second")
    assert len(set(first.values())) == 6
    for path in (tmp_path / "first").iterdir():
        with Image.open(path) as picture:
            assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (64, 64))


def test_demo_pictures_never_join_other_pictures(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"mine")
    with pytest.raises(UserError, match=str(tmp_path)):
        write_demo_pictures(tmp_path, count=1, size=64)
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]
