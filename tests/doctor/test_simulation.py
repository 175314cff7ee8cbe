"""`dry-run-ascend`: refused here with the reason, and its parser held by lines of MindSpore's log."""

import dataclasses
import sys

import program
import pytest

from flux_db.doctor import simulated_step, simulation
from flux_db.doctor.simulation import SimulatedMemory
from flux_db.model import device
from flux_db.model.device import AscendFacts

# The lines of MindSpore's memory adapter for Ascend, as its documentation shows them for GLOG_v=1.
LOG = """\
[INFO] DEVICE(4321,ffff,python):2026-01-01-00:00:00.000.000 [ascend_memory_adapter.cc:100] Initialize] memory of device
Device MOC memory size: 65536M
MindSpore Used memory size: 59392M
MindSpore memory base address: 0xffffe9dc1407
Used peak memory usage (without fragments): 23716M
Actual peak memory usage (with fragments): 26244M
"""


def test_the_peak_is_read_from_mindspores_log():
    memory = simulation.read_memory(LOG.splitlines())
    assert memory == SimulatedMemory(device=65536, usable=59392, peak=23716, peak_with_fragments=26244)
    lines = simulation.describe(memory)
    assert lines[0] == "peak of the step, as MindSpore computes it: 25.6 GB"
    assert "58.0 GB; it fits" in lines[2]
    older = simulation.read_memory(LOG.replace("MOC", "HBM").splitlines())
    assert older == memory
    assert "does not fit" in simulation.describe(memory._replace(usable=20_000))[2]
    assert simulation.describe(simulation.read_memory(["nothing"])) == ["MindSpore wrote no peak into its log"]


def test_a_child_is_watched_to_its_end():
    code = "import os, sys; print(os.environ['MS_SIMULATION_LEVEL'], os.environ['GLOG_v']); sys.stderr.write('''%s''')"
    done = simulation.watch([sys.executable, "-c", code % LOG])
    assert done[:2] == (0, SimulatedMemory(65536, 59392, 23716, 26244)) and "1 1" in done[2]
    code, memory, last = simulation.watch([sys.executable, "-c", "raise SystemExit('error: no such operator')"])
    assert (code, memory, last) == (1, SimulatedMemory(), ["error: no such operator"])


def test_what_cannot_be_simulated_is_refused(world, tmp_path):
    here = AscendFacts(cann="8.3.RC1")
    fine = world.config(tmp_path / "out", device="Ascend", mixed_precision="bf16")
    assert simulation.problem(fine, here) is None
    assert "CANN is not installed" in simulation.problem(
        fine, AscendFacts(loaded=False, error="libge_runner.so: cannot open shared object file")
    )
    assert "leave the flag out" in simulation.problem(world.config(tmp_path / "out"), here)
    sharded = dataclasses.replace(fine, runtime=dataclasses.replace(fine.runtime, shard_base=True))
    assert "one device alone" in simulation.problem(sharded, here)


@pytest.mark.skipif(device.ascend_facts().loaded, reason="there is CANN")
def test_without_cann_the_command_is_refused(world, tmp_path):
    settings = world.settings(tmp_path / "out") | {"device": "auto"}
    done = program.run(program.command("dry-run-ascend", *program.flags(settings)))
    assert done.returncode == 2, done.stderr
    assert "dry-run-ascend: CANN is not installed" in done.stderr and "but no Ascend card" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_step_that_is_simulated_can_be_called(world, tmp_path, capsys):
    """On the CPU, for real: the shapes are those of a run."""
    simulated_step.call_once(world.config(tmp_path / "out", lora_layers="single_transformer_blocks.0.attn.to_q"))
    assert "The step for 32 x 32 with 1 pictures" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
