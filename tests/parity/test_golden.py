"""MindSpore against diffusers on torch: stored reference results, no torch needed here."""

import json

import numpy as np
import pytest
from safetensors import safe_open

from flux_db.__main__ import main
from flux_db.errors import UserError
from flux_db.parity import compare, golden
from flux_db.parity.compare import Row


@pytest.fixture(scope="module")
def rows(cpu):
    return {row.quantity: row for row in compare.compare(cpu, "no")}


QUANTITIES = (
    "inputs drawn", "token ids", "position ids, packing", "timesteps, sigmas", "parameter names", "LoRA file keys",
    "timestep densities", "learning rates", "CLIP pooled", "T5", "VAE moments", "VAE decoded", "transformer",
    "transformer, no guidance", "transformer with LoRA", "loss, 20 cases", "LoRA gradients", "gradient norm, 20 steps",
    "AdamW loss, 20 steps", "picture, 4 steps", "transformer, head size 128", "LoRA gradients, head size 128",
    "CLIP pooled with LoRA", "LoRA gradients, CLIP", "gradient norm, CLIP trained", "AdamW loss, CLIP trained",
    "picture, LoRA of CLIP",
)  # fmt: skip


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_same_as_torch(rows, quantity):
    row = rows[quantity]
    assert row.passed, f"{row.measured:.2e} is more than {row.tolerance:.2e}"


def test_nothing_is_left_out(rows):
    assert rows.keys() == set(QUANTITIES)
    exact = {quantity for quantity, row in rows.items() if row.tolerance == 0}
    assert exact == set(QUANTITIES[:6])


def test_reference_is_small_and_says_what_made_it():
    files = list(golden.FOLDER.iterdir())
    assert sum(file.stat().st_size for file in files) <= 2 * 2**20
    with safe_open(golden.FOLDER / golden.ARRAYS, "numpy") as file:
        of_arrays = json.loads(file.metadata()["versions"])
    of_facts = json.loads((golden.FOLDER / golden.FACTS).read_text())["versions"]
    assert of_arrays == of_facts
    assert of_facts["torch"].startswith("2.13.0") and of_facts["diffusers"] == "0.35.2"
    assert {"peft", "transformers", "numpy", "python"} <= of_facts.keys()


def test_reference_covers_what_it_claims():
    arrays = golden.read().arrays
    assert arrays["losses"].shape == (2, 5, 2) and len(np.unique(arrays["losses"])) == 20
    norms = arrays["adamw.norm"]
    limit = golden.OPTIMIZER["max_grad_norm"]
    assert (norms > limit).any() and (norms < limit).any(), "some steps are clipped and some are not"
    gradients = golden.read().part("gradient.")
    assert len(gradients) == 60 and all(np.abs(g).max() > 1e-4 for g in gradients.values())
    assert {golden.SCHEDULES[i]["lr_scheduler"] for i in range(6)} == {
        name.removeprefix("schedule.") for name in arrays if name.startswith("schedule.")
    }
    difference = np.abs(arrays["transformer.lora"] - arrays["transformer.dev"]).max()
    assert difference > 0.1, "the LoRA takes part"


def test_a_wrong_number_shows():
    wanted = golden.read().arrays
    assert set(golden.distances(wanted, wanted).values()) == {0.0}
    name = "gradient.transformer.transformer_blocks.0.attn.to_q.lora_A.weight"
    wrong = wanted | {name: wanted[name] * 1.01, "adamw.loss": wanted["adamw.loss"] * (1 + 1e-4)}
    distances = golden.distances(wrong, wanted)
    assert distances.pop("LoRA gradients") == pytest.approx(0.01, rel=1e-3)
    assert distances.pop("AdamW loss, 20 steps") == pytest.approx(1e-4, rel=1e-3)
    assert set(distances.values()) == {0.0}
    assert not Row(quantity="", tolerance=1.0, measured=np.nan).passed


def made_again(arrays=None, **facts):
    """The reference as if made again, with some arrays and facts changed."""
    kept = golden.read()
    return golden.Reference(kept.arrays | (arrays or {}), kept.facts | facts)


ELSEWHERE = {"processor": "another one"}


def test_the_same_reference_made_again_has_no_differences():
    assert golden.differences(made_again(), golden.read()) == []
    assert golden.differences(made_again(**ELSEWHERE), golden.read()) == []
    assert golden.processor() == golden.processor() and len(golden.processor()) > 12


def test_another_processor_may_differ_in_the_last_bits_and_no_more():
    """One ulp of adamw.loss is what a Xeon with AMX had different."""
    loss = golden.read().arrays["adamw.loss"]
    last_bits = {"adamw.loss": np.nextafter(loss.astype(np.float32), np.float32(9)).astype(loss.dtype)}
    assert golden.differences(made_again(last_bits, **ELSEWHERE), golden.read()) == []
    assert golden.differences(made_again(last_bits), golden.read()) == ["adamw.loss: not the same bits"]
    wrong = {"adamw.loss": loss * (1 + 1e-4), "bf16/adamw.loss": np.full_like(loss, np.nan)}
    found = golden.differences(made_again(wrong, **ELSEWHERE), golden.read())
    assert found[0].startswith("adamw.loss: differs by ") and found[0].endswith(
        " of its largest value, more than 1e-05"
    )
    assert found[1].startswith("bf16/adamw.loss: differs by nan")


def test_where_no_processor_is_noted_only_the_tolerance_counts():
    kept = golden.read()
    unnoted = golden.Reference(kept.arrays, {name: fact for name, fact in kept.facts.items() if name != "processor"})
    last_bits = {"t5": kept.arrays["t5"] * np.float32(1 + 1e-6)}
    assert golden.differences(made_again(last_bits), unnoted) == []


def test_whole_numbers_names_shapes_and_facts_must_be_the_same_everywhere():
    kept = golden.read()
    ids, drift = kept.arrays["ids.t5"], kept.facts["drift"]
    changed = {"ids.t5": ids + 1, "clip": kept.arrays["clip"][:1], "new": ids}
    triple = {precision: {name: 3 * error for name, error in errors.items()} for precision, errors in drift.items()}
    found = golden.differences(made_again(changed, lora_keys=[], drift=triple, **ELSEWHERE), kept)
    assert found[:4] == [
        "new: is only in one of them",
        "clip: float32[1, 32] instead of float32[2, 32]",
        "ids.t5: not the same bits",
        "lora_keys: not the same",
    ]
    tripled = sum(error > 0 for errors in drift.values() for error in errors.values())  # some are nothing in fp16
    assert len(found) == 4 + tripled and found[4].endswith(": 3 times as large")


def test_tolerances_of_half_precision():
    reference = golden.read()
    of = lambda quantity, device, precision: compare.tolerance(quantity, reference, device, precision)  # noqa: E731
    assert of("transformer", "CPU", "no") == 5e-4
    assert of("T5", "CPU", "fp16") == 2e-4 and of("T5", "Ascend", "bf16") > 0.1
    assert of("VAE decoded", "CPU", "fp16") == 5e-5 and of("VAE decoded", "Ascend", "no") > 1e-2
    assert of("transformer", "Ascend", "no") == of("transformer", "CPU", "fp16")
    # bf16 has 3 bits less than fp16
    ratio = of("transformer", "Ascend", "bf16") / of("transformer", "Ascend", "fp16")
    assert 4 < ratio < 16
    assert of("token ids", "Ascend", "bf16") == 0


@pytest.mark.parametrize(("measured", "code"), [(1e-6, 0), (1e-4, 1)])
def test_selftest_prints_a_table_and_tells_by_its_exit_code(monkeypatch, capsys, measured, code):
    rows = [Row(quantity="token ids", tolerance=0.0, measured=0), Row(quantity="T5", tolerance=1e-5, measured=measured)]
    monkeypatch.setattr(compare, "compare", lambda *_: rows)
    assert main(["selftest", "--device", "CPU"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:5]] == ["quantity", "tolerance", "measured", "result"]
    assert ("FAIL" in lines[3]) == (code == 1) and "pass" in lines[2]
    assert lines[-1] == ("1 of 2 pass; not: T5" if code else "2 of 2 pass")


def test_without_reference_files_it_says_so(tmp_path):
    with pytest.raises(UserError, match="reference results are not there"):
        golden.read(tmp_path)
