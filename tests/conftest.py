"""MindSpore for all tests, set up as the program does it; and a small world to train in."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("GLOG_v", "3")
# A shell ignores them for what it runs in the background, and every program that a test starts would inherit that.
for _number, _action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _action)
sys.path.insert(0, str(Path(__file__).parent))


# The files that take longest, in this order; begun first, so that no worker ends with a long one by itself.
LONGEST = """
training/test_launch graph/test_ascend_graph commands/test_trainer parity/test_golden demo/test_quality
training/test_training training/test_text_encoder training/test_preservation test_full_disk test_train_step
doctor/test_doctor model/test_loading training/test_concept_runs training/test_int8_training model/test_compile_cache
test_fuzz data/test_batches training/test_survival training/test_prompt_options settings/test_inputs test_endings
score/test_score_command test_signals training/test_scoring training/test_lora_levers model/test_operators
training/test_average model/test_lazy_mindone model/test_model_folder run/test_checkpoint model/test_staleness
training/test_bases lora/test_using training/test_validation
"""


def pytest_collection_modifyitems(items):
    places = {name: number for number, name in enumerate(LONGEST.split())}
    folder = Path(__file__).parent

    def place(item):
        return places.get(item.path.relative_to(folder).with_suffix("").as_posix(), len(places))

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def _home_of_the_programs(tmp_path_factory):
    """For all workers the same: what one program has compiled, the next one loads."""
    import program

    own = tmp_path_factory.getbasetemp()
    program.HOME = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "home"
    program.HOME.mkdir(exist_ok=True)
    os.environ["HOME"] = str(program.HOME)  # for the scripts that tests call


@pytest.fixture(scope="session")
def cpu():
    """Graph mode on the CPU, with the CPU operators in place."""
    from flux_db.model import runtime
    from flux_db.settings.schema import RuntimeConfig

    return runtime.start(RuntimeConfig(device="CPU", compile_cache="off"))


@pytest.fixture(autouse=True)
def _mindspore(request):
    """Tests of files that import MindSpore get it set up; the others stay quick."""
    if "mindspore" in sys.modules:
        request.getfixturevalue("cpu")


@pytest.fixture(scope="module", autouse=True)
def _less_to_look_through():
    """MindSpore looks for garbage before every compilation; what earlier files have left takes a tenth of the time."""
    gc.freeze()


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    from world import make_world

    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def whole_world(tmp_path_factory):
    from world import make_world

    return make_world(tmp_path_factory.mktemp("whole"), whole=True)
