"""The live comparison with torch runs only where `scripts/test.sh --interop` has made a second environment."""

import os
import sys

import pytest

collect_ignore_glob = [] if "FLUX_DB_TORCH_PYTHON" in os.environ else ["test_*.py"]


def pytest_unconfigure(config):
    """MindSpore 2.7.1 aborts while Python takes it down after these tests; what pytest found is the exit code."""
    status = getattr(config, "exit_status", None)
    if status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def pytest_sessionfinish(session, exitstatus):
    session.config.exit_status = int(exitstatus)


@pytest.fixture(scope="session")
def world(whole_world):
    """Torch is compared with on the whole tiny model."""
    return whole_world
