"""`doctor`: what each check makes of facts, good and bad, and the whole table for real on the CPU."""

import json
import shutil
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import program
import pytest
from mindspore import Tensor
from test_repo import PROJECT

from flux_db.doctor import machine, operators, result, step, table
from flux_db.doctor.result import Row
from flux_db.model import cpu_layers
from flux_db.model.device import AscendDevice, AscendFacts

GOOD = AscendFacts(devices=8, cann="8.3.RC1", driver="25.3.RC1", accepted_cann=("8.2", "8.3"))
CARD = AscendDevice(soc="ascend910b", name="Ascend910B3", memory=64 * 2**30, free=63 * 2**30)
# As npu-smi 24.1 prints it, cut.
NPU_SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 94.2        47                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3397 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 3210          | python                   | 28700                   |
+===========================+===============+====================================================+
| No running processes found in NPU 1                                                            |
+===========================+===============+====================================================+
"""


def test_the_versions_are_those_that_pip_is_asked_for():
    pins = dict(line.split("==") for line in PROJECT["dependencies"] if "==" in line)
    assert pins == machine.PINNED
    assert machine.versions(machine.installed()).status == "pass"
    old = machine.versions(machine.PINNED | {"mindspore": "2.6.0", "numpy": "2.1.0"})
    assert old.status == "fail" and old.advice.endswith('-m pip install mindspore==2.10.0 "numpy<2"')
    untried = machine.versions(machine.PINNED | {"mindspore": "2.11.0", "numpy": "1.26.4"})
    assert untried.status == "pass" and "MindSpore 2.11.0 was not tried" in untried.advice


@pytest.mark.parametrize(
    ("row", "status", "part"),
    [
        (machine.plugin(GOOD), "pass", "CANN 8.3.RC1"),
        (machine.plugin(AscendFacts(devices=8, cann="8.0.RC1", accepted_cann=("8.2", "8.3"))), "fail", "8.0.RC1"),
        (machine.plugin(AscendFacts(loaded=False, error="libge_runner.so: x", devices=8)), "fail", "did not load"),
        (machine.plugin(AscendFacts(loaded=False, error="libge_runner.so: x")), "not here", "did not load"),
        (machine.driver(GOOD), "pass", "25.3.RC1"),
        (machine.driver(AscendFacts(devices=8)), "fail", "not found"),
        (machine.driver(AscendFacts()), "not here", ""),
        (machine.hardware(GOOD, CARD), "pass", "Ascend910B3, 64 GB HBM, 8 in this machine"),
        (machine.hardware(GOOD, AscendDevice(soc="ascend310p", memory=2**33)), "fail", "8 GB"),
        (machine.hardware(AscendFacts(), None), "not here", "no Ascend card"),
        (machine.free_memory(CARD, []), "pass", "63.0 of 64.0 GB"),
        (machine.free_memory(None, None), "not here", ""),
        (machine.host_memory(2**36, "Ascend"), "pass", "64.0 GB"),
        (machine.host_memory(2**33, "Ascend"), "fail", "8.0 GB"),
        (machine.host_memory(2**33, "CPU"), "pass", "8.0 GB"),
        (machine.disk(2**40, Path("/x")), "pass", "1024.0 GB free in /x"),
        (machine.disk(2**20, Path("/x")), "fail", "0.0 GB"),
    ],
)
def test_what_is_installed_is_judged_by_its_facts(row, status, part):
    assert row.status == status and part in row.found
    assert bool(row.advice) == (status == "fail")


def test_who_else_is_on_the_card_is_named():
    processes = machine.device_processes(NPU_SMI)
    assert processes == [machine.DeviceProcess(0, 3210, "python", 28700)]
    row = machine.free_memory(AscendDevice(memory=64 * 2**30, free=35 * 2**30), processes)
    assert row.status == "fail" and "in use by python (process 3210, 28700 MB on device 0)" in row.found
    assert machine.device_processes("nothing of the kind") == []


def test_a_check_that_raises_fails_alone():
    def broken() -> Row:
        raise RuntimeError("no kernel")

    row = result.timed("matmul", broken)
    assert row[:3] == ("matmul", "fail", "RuntimeError: no kernel") and row.advice


def test_table_and_json():
    rows = [
        Row("one", "pass", "fine"),
        Row("another", "not here", "no Ascend card"),
        Row("third", "fail", "bad", "mend it"),
    ]
    text = table.as_text(rows, "CPU")
    assert "third    fail      bad" in text and "-> mend it" in text
    assert text.endswith("This machine is not ready to train on CPU: 1 pass, 1 fail, 1 not here.")
    assert json.loads(table.as_json(rows[:2], "CPU"))["healthy"] is True
    assert json.loads(table.as_json(rows, "CPU"))["rows"][2]["advice"] == "mend it"


# --- a wrong kernel is found -----------------------------------------------------------------------------------------


def test_attention_that_is_wrong_in_its_scale_is_found(monkeypatch):
    assert operators.attention_at_head_size("CPU", "no").status == "pass"
    monkeypatch.setattr(operators, "attention", lambda device: wrong_attention)
    assert operators.attention_at_head_size("CPU", "no").status == "fail"


def wrong_attention(self, query, key, value, scale):
    return cpu_layers.attend(self, query, key, value, scale * 1.01)


def test_a_dropout_mask_that_is_not_the_formulas_is_found(monkeypatch):
    assert operators.dropout_mask().status == "pass"
    right = operators.dropout.threshold
    monkeypatch.setattr(
        operators.dropout, "threshold", lambda p: right(p) - (sys._getframe(1).f_code.co_name != "__init__")
    )
    assert operators.dropout_mask().status == "fail"


def test_sums_and_products_and_overflow():
    for check in (operators.overflow, operators.int_products, operators.sums_twice, operators.select_and_slice):
        assert check().status == "pass", check()
    assert operators.matmul("fp16").status == "pass"
    assert np.isinf((Tensor([6e4], ms.float16) * Tensor([6e4], ms.float16)).asnumpy()[0])


@pytest.mark.parametrize(("kept", "recomputed", "status"), [(100, 40, "pass"), (100, 100, "fail"), (0, 0, "not here")])
def test_memory_saved_by_recomputing(kept, recomputed, status):
    one = step.Trained([1.0], np.ones(2), kept)
    assert step.memory(one, one._replace(memory=recomputed)).status == status


def test_a_step_that_recomputing_changes_is_found():
    one = step.Trained([1.0, 0.9], np.ones(2), 0)
    assert step.compare("step", "no", one, one).status == "pass"
    assert step.compare("step", "no", one, one._replace(weights=np.array([1, 1.01]))).status == "fail"
    assert step.compare("step", "no", one, one._replace(losses=[1.0, float("nan")])).status == "fail"


# --- the whole -------------------------------------------------------------------------------------------------------


def test_on_the_cpu_everything_that_applies_passes_also_under_msrun(tmp_path):
    words = program.command("doctor", "--json", "--devices", 2, "--all_reduce_mb", 4)
    done = program.run(words, cwd=program.ROOT, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    content = json.loads(done.stdout)
    rows = {row["check"]: row for row in content["rows"]}
    assert content["healthy"] and content["device"] == "CPU"
    assert {row["status"] for row in rows.values()} == {"pass", "not here"}
    for check in ("all-reduce", "training step, O0", "attention, head 128, no", "Concat of 684", "T5 buckets"):
        assert rows[check]["status"] == "pass", rows[check]
    assert "4 MB over 2 devices" in rows["all-reduce"]["found"] and "GB/s" in rows["all-reduce"]["found"]
    assert "CANN is not installed" in rows["MindSpore and CANN"]["found"] or shutil.which("npu-smi")
