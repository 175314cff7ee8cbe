"""Which device is here: what is known of the machine, and what follows from it.

The facts are collected by small functions that ask the file system and MindSpore; every decision is a function of
facts, so that machines with Ascend are tested without one. MindSpore is imported only when it is asked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flux_db.errors import UserError

PATIENCE_SECONDS = 3600
"""So long a rank may wait for another that compiles, draws samples or reads a model."""

# Ascend 910A by MindSpore's name; its successors are ascend910b and ascend910_93.
NO_BF16 = ("ascend910", "ascend310p", "ascend310")
OVERFLOW_MODE = "MS_ASCEND_CHECK_OVERFLOW_MODE"
SATURATION = "SATURATION_MODE"
SIMULATION = "MS_SIMULATION_LEVEL"
"""Environment variable: MindSpore runs as if there were an Ascend device."""
PLUGIN = "libmindspore_ascend.so"
CANN_PLACES = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/latest", "/usr/local/Ascend/cann")
# A shared library that the plugin needs and that the loader did not find.
_MISSING = re.compile(r"\b(lib[\w.+-]*\.so[\w.]*): cannot open shared object file")


def is_one_of_several() -> bool:
    """Whether msrun started this process."""
    return "MS_ROLE" in os.environ


@dataclass(frozen=True, kw_only=True)
class AscendFacts:
    """What is known of Ascend on this machine before a device is chosen."""

    plugin: bool = True
    """MindSpore's wheel has the Ascend plugin's library."""
    loaded: bool = True
    """MindSpore has loaded it."""
    error: str = ""
    """What MindSpore's loader reported."""
    devices: int = 0
    """Ascend devices, by their files /dev/davinci0 and so on."""
    cann: str | None = None
    driver: str | None = None
    accepted_cann: tuple[str, ...] = ()
    """Versions that this MindSpore accepts, by their first two numbers."""


@dataclass(frozen=True, kw_only=True)
class AscendDevice:
    """What is known of the device in use."""

    soc: str = ""
    """MindSpore's name of the chip, such as ascend910b."""
    name: str = ""
    memory: int = 0
    """Bytes of device memory (HBM); 0 if MindSpore does not report it."""
    free: int = 0


# --- decisions -------------------------------------------------------------------------------------------------------


def choose(wanted: str, facts: AscendFacts) -> tuple[str, str]:
    """The device to use, and the reason in words; a UserError if Ascend is demanded and cannot be had."""
    reason = why_no_ascend(facts)
    if wanted == "Ascend" and reason:
        raise UserError(f"--device Ascend: {reason}; or use --device CPU", _complaint(facts))
    if wanted != "auto":
        return wanted, "asked for by --device"
    return ("CPU", f"no Ascend: {reason}") if reason else ("Ascend", "found")


def why_no_ascend(facts: AscendFacts) -> str | None:
    """Why Ascend cannot be used, and what to do; None if it can."""
    if not facts.plugin:
        return "this MindSpore has no Ascend plugin; install MindSpore's wheel for Linux"
    if not facts.loaded:
        missing = missing_library(facts.error)
        if "undefined symbol" in facts.error:
            found = f"CANN {facts.cann}" if facts.cann else "the CANN that was found"
            accepted = f" (it accepts {', '.join(facts.accepted_cann)})" if facts.accepted_cann else ""
            return f"{found} does not fit this MindSpore{accepted}; install a CANN version that fits"
        if missing and "hal" in missing:
            return f"{missing} of the Ascend driver is missing; install the driver, or set LD_LIBRARY_PATH"
        if missing and facts.cann is None:
            return f"CANN is not installed ({missing} is missing)"
        if missing:
            return f"{missing} of CANN {facts.cann} is not found; source CANN's set_env.sh"
        return "MindSpore did not load its Ascend plugin" + (f": {first_line(facts.error)}" if facts.error else "")
    if facts.devices == 0:
        return "there is no Ascend card (no /dev/davinci0); check npu-smi info, and in a container its --device flags"
    return None


def missing_library(error: str) -> str | None:
    """The first library that the loader did not find and that is not MindSpore's own."""
    names = [name for name in _MISSING.findall(error) if not name.startswith("libmindspore")]
    return names[0] if names else None


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _complaint(facts: AscendFacts) -> list[str]:
    lines = [line.strip() for line in facts.error.splitlines() if line.strip()]
    return [f"MindSpore reports: {line}" for line in lines]


def cann_warning(facts: AscendFacts) -> str | None:
    """What to print if CANN's version is not one that this MindSpore accepts."""
    if not facts.cann or not facts.accepted_cann or facts.cann.startswith(facts.accepted_cann):
        return None
    return f"CANN {facts.cann}: this MindSpore accepts {', '.join(facts.accepted_cann)}; results may be wrong"


def precision_problem(device: str, soc: str, precision: str) -> str | None:
    """Why the device cannot compute in this precision; None if it can."""
    if device == "CPU" and precision == "bf16":
        return "--mixed_precision bf16: the CPU backend has no bf16 kernels; use no or fp16"
    if device == "Ascend" and soc in NO_BF16 and precision == "bf16":
        return f"--mixed_precision bf16: {soc} (910A and older) has no bf16; use a 910B or newer"
    if device == "Ascend" and soc in NO_BF16 and precision == "fp16":
        return (
            f"--mixed_precision fp16: on {soc} (910A and older) an overflow gives the largest number instead of Inf,"
            " so that bad gradients are not seen; use a 910B or newer"
        )
    return None


def overflow_problem(device: str, environment: Mapping[str, str]) -> str | None:
    """Why overflows would not be seen; None if they are."""
    if device == "Ascend" and environment.get(OVERFLOW_MODE) == SATURATION:
        return (
            f"{OVERFLOW_MODE}={SATURATION}: an overflow gives the largest number instead of Inf, so that bad gradients"
            " reach the weights; unset the variable"
        )
    return None


def describe(found: AscendDevice, facts: AscendFacts) -> str:
    """A device in words: name, memory, versions; what is not known is left out."""
    parts = [
        found.name or found.soc,
        f"{found.memory / 2**30:.0f} GB HBM" if found.memory else "",
        f"CANN {facts.cann}" if facts.cann else "CANN of unknown version",
        f"driver {facts.driver}" if facts.driver else "driver of unknown version",
    ]
    return ", ".join(part for part in parts if part)


# --- facts -----------------------------------------------------------------------------------------------------------


def ascend_facts() -> AscendFacts:
    """Asked of MindSpore and of the file system."""
    import mindspore
    from mindspore._c_expression import MSContext
    from mindspore.run_check import _check_version

    context = MSContext.get_instance()
    plugins = Path(mindspore.__file__).parent / "lib" / "plugin"
    checker = getattr(_check_version, "AscendEnvChecker", None)
    return AscendFacts(
        plugin=any(plugins.glob(f"{PLUGIN}*")),
        loaded=context.is_pkg_support_device("Ascend"),
        error=context.load_plugin_error(),
        devices=count_devices(Path("/dev")) or int(SIMULATION in os.environ),
        cann=cann_version(os.environ, CANN_PLACES),
        driver=driver_version(Path("/etc/ascend_install.info"), Path("/usr/local/Ascend/driver")),
        accepted_cann=tuple(checker(None).version) if checker else (),
    )


def count_devices(devices: Path) -> int:
    return sum(re.fullmatch(r"davinci\d+", path.name) is not None for path in devices.glob("davinci*"))


def cann_version(environment: Mapping[str, str], places: Iterable[str]) -> str | None:
    """Of the CANN that the environment names, otherwise of the one in the usual place."""
    opp = environment.get("ASCEND_OPP_PATH")
    named = [environment.get(name) for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    roots = [Path(root) for root in (*named, os.path.dirname(opp.rstrip("/")) if opp else None, *places) if root]
    files = [root / part / "version.info" for root in roots for part in ("compiler", "runtime", "toolkit", ".")]
    return next((version for file in files if (version := _version(file))), None)


def driver_version(install_info: Path, usual: Path) -> str | None:
    """Of the Ascend driver, wherever it was installed."""
    place = _entry(install_info, "Driver_Install_Path_Param")
    roots = [Path(place) / "driver"] if place else []
    return next((version for root in (*roots, usual) if (version := _version(root / "version.info"))), None)


def _version(file: Path) -> str | None:
    return _entry(file, "Version") or _entry(file, "version")


def _entry(file: Path, name: str) -> str | None:
    try:
        lines = file.read_text(errors="replace")[:100_000].splitlines()
    except OSError:
        return None
    return next((line.split("=", 1)[1].strip() or None for line in lines if line.startswith(f"{name}=")), None)


def soc_name() -> str:
    """MindSpore's name of the chip; empty on the CPU."""
    from mindspore._c_expression import MSContext

    return MSContext.get_instance().get_ascend_soc_version()


def ascend_device() -> AscendDevice:
    """The device of this process, once it is set; MindSpore reports its memory only after the first operator ran."""
    import mindspore as ms

    number = ms.get_context("device_id")
    properties = ms.hal.get_device_properties(number, "Ascend")
    return AscendDevice(
        soc=soc_name(),
        name=properties.name,
        memory=int(properties.total_memory),
        free=int(properties.free_memory),
    )
