"""The device, found and named: decisions from facts, so that machines with Ascend are tested without one."""

import dataclasses
import fcntl
import os
import pty
import struct
import termios
import time

import program
import pytest

from flux_db.errors import UserError
from flux_db.model import device
from flux_db.model.device import AscendDevice, AscendFacts

GOOD = AscendFacts(devices=8, cann="8.3.RC1", driver="25.2.0", accepted_cann=("7.8", "8.2", "8.3"))
# As MindSpore 2.7.1's loader reports them.
NO_CANN = (
    "Load dynamic library: libmindspore_ascend.so.2 failed. libge_runner.so: cannot open shared object file: No such"
)
NO_CANN += (
    " file or directory\nLoad dynamic library: libmindspore_ops_ascend.so failed. libmindspore_ascend_res_manager.so:"
)
NO_CANN += " cannot open shared object file: No such file or directory\n"
OLD_CANN = "Load dynamic library: libmindspore_ascend.so.2 failed. libmindspore_ascend.so.2: undefined symbol: aclnnX\n"
NO_DRIVER = NO_CANN.replace("libge_runner.so", "libascend_hal.so")


def facts(**changes) -> AscendFacts:
    return dataclasses.replace(GOOD, **changes)


BROKEN = {
    "no plugin": (facts(plugin=False, loaded=False), "has no Ascend plugin; install MindSpore's wheel for Linux"),
    "no CANN": (facts(loaded=False, error=NO_CANN, cann=None), "CANN is not installed (libge_runner.so is missing)"),
    "CANN not set up": (
        facts(loaded=False, error=NO_CANN),
        "libge_runner.so of CANN 8.3.RC1 is not found; source CANN's",
    ),
    "CANN too old": (
        facts(loaded=False, error=OLD_CANN, cann="7.0.0"),
        "CANN 7.0.0 does not fit this MindSpore (it accepts 7.8, 8.2, 8.3)",
    ),
    "no driver": (facts(loaded=False, error=NO_DRIVER), "libascend_hal.so of the Ascend driver is missing"),
    "no card": (facts(devices=0), "there is no Ascend card (no /dev/davinci0)"),
    "unknown": (facts(loaded=False, error="something else\n"), "did not load its Ascend plugin: something else"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_auto_never_takes_the_cpu_without_a_reason(name):
    known, reason = BROKEN[name]
    chosen, words = device.choose("auto", known)
    assert chosen == "CPU" and reason in words


@pytest.mark.parametrize("name", BROKEN)
def test_ascend_that_is_asked_for_and_not_there_is_an_error_with_mindspores_own_words(name):
    known, reason = BROKEN[name]
    with pytest.raises(UserError) as caught:
        device.choose("Ascend", known)
    assert reason in str(caught.value) and "--device Ascend" in str(caught.value)
    for line in known.error.splitlines():
        assert line in str(caught.value)


def test_a_card_that_is_there_is_taken():
    assert device.choose("auto", GOOD) == ("Ascend", "found")
    assert device.choose("Ascend", GOOD) == ("Ascend", "asked for by --device")
    assert device.choose("CPU", GOOD) == ("CPU", "asked for by --device")


@pytest.mark.parametrize(
    ("on", "soc", "precision", "problem"),
    [
        ("CPU", "", "bf16", "the CPU backend has no bf16 kernels"),
        ("Ascend", "ascend910", "bf16", "has no bf16; use a 910B or newer"),
        ("Ascend", "ascend910", "fp16", "gives the largest number instead of Inf"),
        ("Ascend", "ascend910b", "bf16", None),
        ("Ascend", "ascend910_93", "bf16", None),
        ("Ascend", "ascend910b", "fp16", None),
        ("Ascend", "ascend910", "no", None),
        ("CPU", "", "fp16", None),
    ],
)
def test_precision_that_the_chip_lacks_is_refused(on, soc, precision, problem):
    found = device.precision_problem(on, soc, precision)
    assert found is None if problem is None else problem in found


def test_saturation_is_refused_on_ascend():
    saturating = {device.OVERFLOW_MODE: "SATURATION_MODE"}
    assert "unset the variable" in device.overflow_problem("Ascend", saturating)
    assert device.overflow_problem("CPU", saturating) is None
    assert device.overflow_problem("Ascend", {device.OVERFLOW_MODE: "INFNAN_MODE"}) is None


def test_a_cann_that_mindspore_does_not_accept_is_a_warning():
    assert "accepts 7.8, 8.2, 8.3" in device.cann_warning(facts(cann="8.0.RC3"))
    assert device.cann_warning(GOOD) is None and device.cann_warning(facts(cann=None)) is None


def test_a_card_in_words():
    card = AscendDevice(soc="ascend910b", name="Ascend910B3", memory=64 * 2**30)
    assert device.describe(card, GOOD) == "Ascend910B3, 64 GB HBM, CANN 8.3.RC1, driver 25.2.0"
    unknown = facts(cann=None, driver=None)
    assert device.describe(AscendDevice(soc="ascend910b"), unknown) == (
        "ascend910b, CANN of unknown version, driver of unknown version"
    )


def test_versions_are_read_from_the_places_of_cann_and_driver(tmp_path):
    toolkit = tmp_path / "toolkit"
    (toolkit / "compiler").mkdir(parents=True)
    (toolkit / "compiler" / "version.info").write_text("Name=x\nVersion=8.3.RC1\nversion_dir=1\n")
    for variables in ({"ASCEND_HOME_PATH": str(toolkit)}, {"ASCEND_OPP_PATH": f"{toolkit}/opp"}):
        assert device.cann_version(variables, ()) == "8.3.RC1"
    assert device.cann_version({}, (str(toolkit),)) == "8.3.RC1"
    assert device.cann_version({}, ()) is None
    driver = tmp_path / "ascend" / "driver"
    driver.mkdir(parents=True)
    (driver / "version.info").write_text("Version=25.2.0\nascendhal_version=7\n")
    info = tmp_path / "ascend_install.info"
    info.write_text(f"Driver_Install_Type=full\nDriver_Install_Path_Param={tmp_path}/ascend\n")
    assert device.driver_version(info, tmp_path / "nowhere") == "25.2.0"
    assert device.driver_version(tmp_path / "none", driver) == "25.2.0"
    assert device.driver_version(tmp_path / "none", tmp_path / "nowhere") is None


def test_cards_are_counted_by_their_device_files(tmp_path):
    for name in ("davinci0", "davinci7", "davinci_manager", "null"):
        (tmp_path / name).write_text("")
    assert device.count_devices(tmp_path) == 2


@pytest.mark.skipif(device.count_devices(device.Path("/dev")) > 0, reason="there is a device")
def test_here_there_is_no_card_and_the_program_prints_why(world, tmp_path):
    done = program.run(program.trainer(world.settings(tmp_path / "out") | {"device": "Ascend"}))
    assert done.returncode == 2 and "--device Ascend: CANN is not installed" in done.stderr
    assert "MindSpore reports: Load dynamic library" in done.stderr
    settings = world.settings(tmp_path / "out") | {"device": "auto", "mixed_precision": "bf16"}
    done = program.run(program.trainer(settings))
    assert done.returncode == 2 and "no bf16 kernels; use no or fp16 (no Ascend: CANN is not installed" in done.stderr


SECOND_SERVER = ["--nodes", 2, "--node_rank", 1, "--master_addr", "127.0.0.2"]


@pytest.mark.skipif(device.count_devices(device.Path("/dev")) > 0, reason="there is a device")
@pytest.mark.parametrize(
    "start",
    [
        lambda flags: [program.PYTHON, str(program.SCRIPT), *flags],
        lambda flags: program.command("prepare", *flags),
        lambda flags: program.command("launch", "--devices", 2, "--", *flags),
        lambda flags: program.command("launch", "--devices", 2, *SECOND_SERVER, "--", *flags),
    ],
    ids=["trainer", "prepare", "launch", "launch on the second server"],
)
def test_a_missing_device_is_reported_before_anything_is_fetched_or_encoded(world, tmp_path, start):
    """The hub cannot be reached: a program that asked it for the model would end with that."""
    settings = world.settings(tmp_path / "out", device="Ascend", pretrained_model_name_or_path="owner/model")
    offline = program.environment(HF_HUB_OFFLINE="1")
    done = program.run(start(program.flags(settings)), env=offline, timeout=60)
    assert done.returncode == 2 and "--device Ascend: CANN is not installed" in done.stderr
    assert "Fetching" not in done.stderr and not (tmp_path / "out").exists()


def test_check_reports_whether_the_device_is_here(world, tmp_path):
    def check(**changes) -> str:
        done = program.run(program.command("check", *program.flags(world.settings(tmp_path / "out", **changes))))
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = check()
    assert "device             CPU, here" in text and text.endswith("No problems: the run can start.\n")
    if device.count_devices(device.Path("/dev")) == 0:
        text = check(device="Ascend")
        assert "device             Ascend, not here\n" in text and "the run can start" not in text
        assert "the run cannot start on this machine:\n  --device Ascend: CANN is not installed" in text


def test_distributed_without_msrun_is_a_problem_among_the_others(world, tmp_path):
    settings = world.settings(tmp_path / "out", distributed=True, rank=0)
    done = program.run(program.trainer(settings))
    assert done.returncode == 2 and "--distributed: msrun did not start" in done.stderr and "--rank 0" in done.stderr
    assert not (tmp_path / "out").exists()


CLOCK = """
import time
from flux_db.console import stage, say
with stage("Compiling"):
    time.sleep(2.6)
    say("a line in between")
say("after")
"""


def test_on_a_terminal_a_clock_runs_while_a_stage_lasts():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # 24 lines of 80 characters
    process = program.start([program.PYTHON, "-c", CLOCK], stderr=theirs, stdout=theirs, stdin=theirs)
    os.close(theirs)
    text, end = b"", time.monotonic() + 30
    while time.monotonic() < end:
        try:
            text += os.read(ours, 4096)
        except OSError:  # the program has ended
            break
    os.close(ours)
    assert process.wait(10) == 0
    shown = text.decode()
    assert "Compiling ..." in shown and "0:01" in shown and "0:02" in shown
    assert shown.index("0:02") < shown.index("done in 2.") < shown.index("after")


def test_in_a_log_there_is_no_clock():
    done = program.run([program.PYTHON, "-c", CLOCK])
    assert done.stderr.splitlines()[0] == "Compiling ..." and "0:0" not in done.stderr
