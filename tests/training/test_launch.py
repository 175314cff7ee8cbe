"""Several devices, for real: the launch scripts and msrun with two CPU processes."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import program
import psutil
import pytest
from program import flags
from safetensors.numpy import load
from scoring_models import write_dino
from world import PROMPT, lora_bytes, metrics

from flux_db.interrupt import COMMAND, resume_command
from flux_db.run.saved_state import lora_steps
from flux_db.training import worker_logs
from flux_db.training.launch import Devices

# LoRA in one layer only: the step compiles in seconds
QUICK = {"lora_layers": "single_transformer_blocks.0.attn.to_q", "max_train_steps": 10, "checkpointing_steps": 5}
VALIDATION = {"validation_prompt": "a dog", "num_validation_images": 3, "validation_steps": 5}
VALIDATION |= {"validation_inference_steps": 2}

# Both LoRAs, with two ranks and three learning rates in that of the transformer, and the levers of the loss.
LEVERS = {
    "lora_layers": "single_transformer_blocks.0.attn.to_q,single_transformer_blocks.0.attn.to_k",
    "lora_rank_pattern": "to_q=2",
    "lora_lr_pattern": "to_q=2",
    "loraplus_ratio": 4,
    "ema_decay": 0.9,
    "loss": "huber",
    "timestep_sampling": "flux_shift",
    "train_text_encoder": True,
    "text_encoder_lr": 1e-2,
    "text_encoder_steps": 3,
    "caption_dropout": 0.3,
    "max_train_steps": 5,
    "checkpointing_steps": 5,
}


HERE = Path(__file__).parent


def start(settings: dict, devices: int = 2) -> subprocess.Popen:
    """The launch script."""
    command = program.script(f"train_{'multi' if devices > 1 else 'single'}.sh", *flags(settings))
    return _start(command, DEVICES=str(devices))


def start_wrong(settings: dict, wrong: str) -> subprocess.Popen:
    """The same launch on two devices, with ranks.py as the trainer."""
    code = "import sys; from flux_db import child, __main__ as m; child.SCRIPT = sys.argv[1]; "
    code += "sys.exit(m.main(['launch', '--devices', '2', '--', *sys.argv[2:]]))"
    return _start([program.PYTHON, "-c", code, str(HERE / "ranks.py"), *flags(settings)], WRONG=wrong)


STUBBED = """
import sys
from pathlib import Path
from flux_db.training import launch

launch.MSRUN = [sys.executable, sys.argv[1]]
words = sys.argv[2:]
with launch.Supervisor(Path(words[1], "logs")) as supervisor:
    sys.exit(supervisor.run_workers(["train.py", *words], launch.Devices(devices=2), 0))
"""


def start_under_stub(output: Path, wrong: str = "") -> subprocess.Popen:
    """The workers of a launch under stub_msrun.py: no MindSpore, and a second or two."""
    words = [program.PYTHON, "-c", STUBBED, str(HERE / "stub_msrun.py"), "--output_dir", str(output)]
    return _start(words, WRONG=wrong)


def _start(command: list[str], **variables: str) -> subprocess.Popen:
    environment = program.environment(**variables)
    return program.start(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen) -> str:
    text = process.communicate(timeout=300)[0]
    assert not left_over(process.args), "no process may outlive the script"
    return text


def left_over(args: list[str]) -> list[int]:
    """Processes of a launch on the same output folder that are still there."""
    output = args[args.index("--output_dir") + 1]
    found = psutil.process_iter(["cmdline"])
    return [one.pid for one in found if one.pid != os.getpid() and output in (one.info["cmdline"] or ())]


def workers(args: list[str]) -> dict[int, int]:
    """Rank and number of each worker's process."""
    found = {}
    for pid in left_over(args):
        with contextlib.suppress(psutil.Error):  # it has just ended
            variables = psutil.Process(pid).environ()
            if variables.get("MS_ROLE") == "MS_WORKER":
                found[int(variables["RANK_ID"])] = pid
    return found


def wait_for_steps(process: subprocess.Popen, output: Path, count: int) -> None:
    end = time.monotonic() + 200
    while time.monotonic() < end and process.poll() is None:
        path = output / "metrics.jsonl"
        if path.exists() and sum('"loss"' in line for line in path.read_text().splitlines()) >= count:
            return
        time.sleep(0.05)
    pytest.fail(f"no {count} steps: exit code {process.poll()}")


def largest_difference(first: Path, second: Path) -> float:
    one, two = load(lora_bytes(first)), load(lora_bytes(second))
    assert one.keys() == two.keys()
    return max(float(np.abs(one[name] - two[name]).max()) for name in one)


def losses(output: Path) -> list[float]:
    return [row["loss"] for row in metrics(output) if "loss" in row]


@pytest.fixture(scope="module")
def single(world, tmp_path_factory):
    """Ten steps on one device, by the script for one device."""
    output = tmp_path_factory.mktemp("single")
    process = start(world.settings(output, train_batch_size=4, **QUICK), devices=1)
    text = finish(process)
    assert process.returncode == 0, text[-3000:]
    assert "training: 100%" in text and "Done." in text
    assert "training: 100%" in (output / "logs" / "worker_0.log").read_text()
    return output


def test_two_devices_are_stopped_on_the_same_step_and_one_goes_on_to_the_same_result(world, single, tmp_path):
    """Two devices with samples, stopped by SIGTERM; then one, from step 5 on: the same run as ten steps on one."""
    output = tmp_path / "run"
    endless = {"max_train_steps": 100_000, "checkpointing_steps": 5}
    process = start(world.settings(output, train_batch_size=2, **QUICK | VALIDATION | endless))
    wait_for_steps(process, output, 6)
    # as a scheduler does that sends it to every process of a job, but the workers have it from the launcher alone
    for pid in set(left_over(process.args)) - set(workers(process.args).values()):
        os.kill(pid, signal.SIGTERM)
    text = finish(process)
    assert process.returncode == 128 + signal.SIGTERM, text[-3000:]
    assert "2 processes" in text and "[INFO]" not in text
    state = json.loads((output / "train_state.json").read_text())
    assert state["status"] == "interrupted"
    assert Path(state["last_good_checkpoint"]).name == f"checkpoint-{state['step']}"
    command = text.strip().splitlines()[-1].strip()
    assert command.startswith("env DEVICES=2 bash scripts/train_multi.sh --"), command
    assert command.endswith("--resume_from_checkpoint latest")
    assert losses(output)[:5] == pytest.approx(losses(single)[:5], rel=1e-5)
    for step in (0, 5):
        names = sorted(path.name for path in (output / "samples" / f"step-{step:05d}").iterdir())
        assert names == ["00.png", "01.png", "02.png"]

    middle = str(output / "checkpoint-5")
    more = world.settings(output, train_batch_size=4, resume_from_checkpoint=middle, **QUICK)
    process = start(more, devices=1)
    text = finish(process)
    assert process.returncode == 0, text[-3000:]
    assert "Going on from" in text
    assert largest_difference(output, single) < 1e-5
    assert losses(output) == pytest.approx(losses(single), rel=1e-5)


def test_a_base_spread_over_the_devices_trains_the_same(world, single, tmp_path):
    """And the first device scores the samples, by a network that it alone loads."""
    settings = world.settings(tmp_path / "run", train_batch_size=2, shard_base=True, **QUICK)
    scored = {"validation_prompt": [PROMPT], "score_steps": 5, "keep_best": "score", "num_validation_images": 1}
    scored["score_dino"] = str(write_dino(tmp_path / "dino"))
    process = start(settings | VALIDATION | {"validation_steps": 10} | scored)
    text = finish(process)
    assert process.returncode == 0 and "Done." in text, text[-3000:]
    kept = text.partition("Each device keeps ")[2].split()
    assert float(kept[0]) < 0.6 * float(kept[5]), kept
    assert largest_difference(tmp_path / "run", single) < 1e-5
    assert (tmp_path / "run" / "samples" / "step-00010" / "00.png").is_file()
    scores = {row["step"]: row["score"] for row in metrics(tmp_path / "run") if "score" in row}
    assert scores.keys() == {0, 5, 10}
    assert lora_steps(tmp_path / "run" / "best_lora.safetensors") == max((5, 10), key=lambda step: scores[step])


def test_nan_on_one_rank_skips_all_and_other_weights_end_the_run(world, tmp_path):
    output = tmp_path / "run"
    settings = world.settings(output, train_batch_size=2, **QUICK | {"max_train_steps": 10, "checkpointing_steps": 4})
    process = start_wrong(settings, "nan_in_step_two_and_other_weights_after_step_three")
    text = finish(process)
    assert process.returncode == 1, text[-3000:]
    assert "at step 4 the devices differ from rank 0 in: LoRA weights (rank 1)" in text
    assert [row["skipped"] for row in metrics(output) if "loss" in row] == [0, 1, 1, 1]
    assert json.loads((output / "train_state.json").read_text())["status"] == "failed"
    assert not list(output.glob("checkpoint-*"))


# --- failures, under a stub of msrun -----------------------------------------------------------------------------


def test_a_killed_worker_ends_the_job(tmp_path):
    output = tmp_path / "run"
    process = start_under_stub(output)
    program.wait_until(lambda: not worker_logs.is_silent(output / "logs", 1), 100, "a worker that has joined")
    os.kill(workers(process.args)[1], signal.SIGKILL)
    text = finish(process)
    assert process.returncode == 128 + signal.SIGKILL, text[-3000:]
    assert f"rank 1 was ended by SIGKILL, and the other ranks were stopped. Its last lines, from {output}" in text


def test_no_process_outlives_a_killed_launch(tmp_path):
    process = start_under_stub(tmp_path / "run")
    program.wait_until(lambda: len(workers(process.args)) == 2, 100, "two workers")
    process.kill()
    process.communicate(timeout=20)
    program.wait_until(lambda: not left_over(process.args), 5, "the end of all processes")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("fail_before_init", "this rank fails before it has joined the others"),
        ("raise_after_init", "this rank fails after it has joined the others"),
    ],
)
def test_what_goes_wrong_on_one_rank_is_reported(tmp_path, wrong, message):
    begin = time.monotonic()
    process = start_under_stub(tmp_path / "run", wrong)
    text = finish(process)
    assert (process.returncode, message in text) == (1, True), text[-3000:]
    assert "error: rank 1 failed" in text and str(tmp_path / "run" / "logs" / "worker_1.log") in text
    assert text.count("Traceback") <= 1
    assert time.monotonic() - begin < 100, "the scheduler would wait for minutes"


def test_a_crash_of_mindspore_after_the_end_of_a_run_is_no_failure(tmp_path):
    process = start_under_stub(tmp_path / "run", "crash_when_done")
    text = finish(process)
    assert process.returncode == 0 and "the run was complete" in text, text[-3000:]


# --- without processes -------------------------------------------------------------------------------------------


def test_help_and_missing_variables():
    def run(name: str, *words: str) -> subprocess.CompletedProcess:
        return program.run(program.script(name, *words))

    for name, variable in (
        ("train_single.sh", "LOG_DIR"),
        ("train_multi.sh", "DEVICES"),
        ("train_nodes.sh", "MASTER_ADDR"),
    ):
        done = run(name, "--help")
        assert done.returncode == 0 and variable in done.stdout and "#" not in done.stdout
    done = run("train_nodes.sh")
    assert done.returncode and "NODES" in done.stderr
    done = run("train_multi.sh", "--rank", "0")
    assert done.returncode == 2 and "--rank 0" in done.stderr and "Traceback" not in done.stderr


def test_where_the_cards_are_is_checked():
    assert Devices(devices=8).problems() == []
    assert Devices(devices=8, nodes=2, node_rank=1, master_addr="10.0.0.1").problems() == []
    assert len(Devices(devices=0, nodes=2, node_rank=2).problems()) == 3


LOG = """Loading the transformer ...
training:   0%|          | 0/6\rtraining:  17%|#         | 1/6
[WARNING] DEVICE(1,python):2026 something
Traceback (most recent call last):
  File "x.py", line 1, in <module>
RuntimeError: it broke

----------------------------------------------------
- C++ Call Stack: (For framework developers)
----------------------------------------------------
mindspore/ccsrc/a.cc:12 Run

"""


def test_the_last_error_is_found_in_a_log():
    assert worker_logs.last_error(LOG) == [
        "Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "RuntimeError: it broke",
    ]  # fmt: skip
    assert worker_logs.last_error("a\nb\nc\nd\n") == ["b", "c", "d"]
    assert worker_logs.last_error("Traceback\n" + "deep\n" * 50 + "error\n")[-1] == "error"
    assert len(worker_logs.last_error("Traceback\n" + "deep\n" * 50)) == worker_logs.SHOWN_LINES
    assert worker_logs.last_error("") == []


def test_a_worker_that_said_nothing_yet_is_joining(tmp_path):
    assert worker_logs.is_silent(tmp_path, 0)
    (tmp_path / "worker_0.log").write_text("[WARNING] ME(1,python):2026 something\n")
    assert worker_logs.is_silent(tmp_path, 0)
    (tmp_path / "worker_0.log").write_text("Loading the transformer ...\n")
    assert not worker_logs.is_silent(tmp_path, 0)


def test_the_rank_that_failed_first_is_found_in_the_log_of_msrun(tmp_path, capsys):
    (tmp_path / "worker_0.log").write_text("all is well\n")
    (tmp_path / "worker_1.log").write_text("error: no such folder\n")
    msrun = tmp_path / worker_logs.MSRUN
    msrun.write_text("Worker process 76 has rank 0\nWorker process 77 has rank 1\n")
    assert not worker_logs.has_failed(tmp_path)
    with msrun.open("a") as log:
        log.write("[ERROR] Worker process 77 exit with exception. Error code: 2.\n")
    assert worker_logs.has_failed(tmp_path) and worker_logs.report_failure(tmp_path) == 2
    shown = capsys.readouterr().err
    assert "rank 1 failed with exit code 2" in shown and "error: no such folder" in shown
    msrun.write_text("msrun: no such option\n")
    assert worker_logs.report_failure(tmp_path) == 1
    assert worker_logs.MSRUN in capsys.readouterr().err


def test_logs_of_the_launch_before_are_kept(tmp_path):
    (tmp_path / "worker_1.log").write_text("first")
    worker_logs.keep_old(tmp_path)
    assert (tmp_path / "worker_1.log.old").read_text() == "first"


def test_a_launched_run_is_resumed_by_its_script(monkeypatch):
    argv = ["train.py", "--rank", "4", "--resume_from_checkpoint", "old"]
    assert resume_command(argv) == "python train.py --rank 4 --resume_from_checkpoint latest"
    monkeypatch.setenv(COMMAND, "env DEVICES=2 bash scripts/train_multi.sh")
    assert resume_command(argv) == "env DEVICES=2 bash scripts/train_multi.sh --rank 4 --resume_from_checkpoint latest"


BOUND = """
import sys
from pathlib import Path
from flux_db.training.launch import Devices, Supervisor
with Supervisor(Path(sys.argv[1])) as supervisor:
    sys.exit(supervisor.run_workers([sys.argv[2]], Devices(devices=2, bind_core=True), 0))
"""
AFFINITY = """
import os
from pathlib import Path
if os.environ["MS_ROLE"] == "MS_WORKER":
    Path(__file__).with_name(f"cores_{os.environ['RANK_ID']}").write_text(str(sorted(os.sched_getaffinity(0))))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPU cores")
def test_bind_core_ties_each_worker_to_cores_of_its_own(tmp_path):
    """By the real msrun, with workers that only write down their cores."""
    script = tmp_path / "affinity.py"
    script.write_text(AFFINITY)
    done = program.run([program.PYTHON, "-c", BOUND, str(tmp_path / "logs"), str(script)], timeout=200)
    cores = [set(json.loads((tmp_path / f"cores_{rank}").read_text())) for rank in (0, 1)]
    assert done.returncode == 0 and cores[0] and cores[1] and not cores[0] & cores[1], done.stderr


def test_two_devices_train_with_every_lever_as_one_does(world, tmp_path):
    """The ranks' weights and moments are compared bit by bit when the checkpoint is saved."""
    for devices in (1, 2):
        settings = world.settings(tmp_path / str(devices), train_batch_size=4 // devices, **LEVERS)
        process = start(settings, devices=devices)
        text = finish(process)
        assert process.returncode == 0, text[-3000:]
    one, two = tmp_path / "1", tmp_path / "2"
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    difference = largest_difference(one, two)
    print(f"largest difference of a weight {difference:.1e}")
    assert difference <= 1e-5
    weights = {name: value for name, value in load(lora_bytes(two)).items() if "lora_" in name}  # no alphas
    moved = {name: abs(value).max() for name, value in weights.items() if "text_encoder." in name}
    assert len(moved) == 16 and all(value > 1e-3 for value in moved.values())
    ranks = {name: value.shape[0] for name, value in weights.items() if name.endswith("lora_A.weight")}
    assert [rank for name, rank in ranks.items() if "to_q" in name] == [2]
