"""MindSpore for all tests, set up as the program does it; and a small world to train in."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("GLOG_v", "3")
sys.path.insert(0, str(Path(__file__).parent))


# The files that take longest, in this order; begun first, so that no worker ends with a long one by itself.
LONGEST = """
test_full_disk commands/test_trainer training/test_launch training/test_training training/test_survival
training/test_text_encoder
parity/test_golden test_train_step data/test_batches test_endings model/test_staleness lora/test_using
settings/test_inputs test_signals training/test_validation test_fuzz model/test_model_folder
"""


def pytest_collection_modifyitems(items):
    places = {name: number for number, name in enumerate(LONGEST.split())}
    folder = Path(__file__).parent

    def place(item):
        return places.get(item.path.relative_to(folder).with_suffix("").as_posix(), len(places))

    items.sort(key=place)


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


@pytest.fixture(scope="session")
def whole_world(tmp_path_factory):
    from world import make_world

    return make_world(tmp_path_factory.mktemp("whole"), whole=True)
