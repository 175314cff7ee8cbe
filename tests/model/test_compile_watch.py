"""A compilation that grows without end ends the program, with one line."""

import mindspore as ms
import program
import pytest

from flux_db import releases
from flux_db.errors import UserError
from flux_db.model import compile_watch

# Of three constants, the first of another shape and the last of another type, MindSpore 2.8 and later rewrite the
# product for ever. An operator that has moved is another matter: that is tested in test_operators.py.
ENDLESS = """
import mindspore as ms, numpy as np
from mindspore import Tensor, nn, ops
from flux_db.model import runtime
from flux_db.settings.schema import RuntimeConfig

@ops.constexpr
def row(count):
    return Tensor(np.arange(1, count + 1).astype(np.float32))

class Product(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first, self.last = Tensor([[1000.0]], ms.float32), 1

    def construct(self, x):
        return x + ops.Mul()(ops.Mul()(self.first, row(4)), self.last)

runtime.start(RuntimeConfig(device="CPU", compile_cache="off"))
print(Product()(Tensor(np.ones((1, 4), np.float32))).shape)
"""


def test_a_compilation_without_end_is_ended(tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    variables = {compile_watch.VARIABLE: "0.01", "PYTHONPATH": str(program.ROOT)}  # 6 s
    done = program.run([program.PYTHON, str(script)], env=program.environment(**variables), timeout=120)
    if releases.numbers(ms.__version__) < (2, 8):
        assert done.returncode == 0 and "(1, 4)" in done.stdout, done.stderr
        return
    assert done.returncode == 1, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert f"MindSpore {ms.__version__} does not come to an end with compiling Product" in line


def test_a_run_whose_compilation_takes_too_long_is_ended(world, tmp_path):
    settings = world.settings(tmp_path / "out", compile_cache="off")
    done = program.run(program.trainer(settings), env=program.environment(**{compile_watch.VARIABLE: "0.0001"}))
    assert done.returncode == 1 and done.stderr.count("does not come to an end") == 1, done.stderr[-2000:]
    assert "Traceback" not in done.stderr


def test_limits_grow_with_the_network_and_stay_below_the_machine():
    small, large = (compile_watch.limits(cells, 0, 10**12, 1) for cells in (100, 4000))
    assert 600 < small.seconds < large.seconds and 2e9 < small.bytes < large.bytes < 16e9
    assert compile_watch.limits(4000, 24 * 10**9, 20 * 10**9, 1).bytes < 20 * 10**9
    assert compile_watch.limits(100, 0, 10**12, 2).seconds == 2 * small.seconds


@pytest.mark.parametrize("given", ["x", "-1", "nan", "inf"])
def test_a_factor_that_is_no_number_is_refused(given):
    with pytest.raises(UserError, match=compile_watch.VARIABLE):
        compile_watch.factor({compile_watch.VARIABLE: given})
    assert compile_watch.factor({}) == 1 and compile_watch.factor({compile_watch.VARIABLE: "0"}) == 0
