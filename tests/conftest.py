"""MindSpore for all tests, set up as the program does it; and a small world to train in."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("GLOG_v", "3")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def cpu():
    """Graph mode on the CPU, with the CPU operators in place."""
    from flux_db.model import runtime
    from flux_db.settings.schema import RuntimeConfig

    return runtime.start(RuntimeConfig(device="CPU"))


@pytest.fixture(autouse=True)
def _mindspore(request):
    """Tests of files that import MindSpore get it set up; the others stay quick."""
    if "mindspore" in sys.modules:
        request.getfixturevalue("cpu")


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    from world import make_world

    return make_world(tmp_path_factory.mktemp("world"))
