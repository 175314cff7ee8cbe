"""MindSpore for all tests: quiet, on the CPU, in graph mode."""

import os
import sys

import pytest

os.environ.setdefault("GLOG_v", "3")


@pytest.fixture(scope="session")
def mindspore_on_cpu():
    import mindspore as ms

    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)


@pytest.fixture(autouse=True)
def _graph_mode(request):
    """Tests of files that import MindSpore get it set up; the others stay quick."""
    if "mindspore" in sys.modules:
        request.getfixturevalue("mindspore_on_cpu")
