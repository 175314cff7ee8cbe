"""scipy is imported when it is used, and then it is scipy."""

import program

ENTERED = """
import sys
from flux_db.model import runtime
from flux_db.model.quiet import quiet
with quiet():
    from mindone.diffusers import FluxPipeline
print("scipy._lib" in sys.modules)
"""
USED = """
from importlib.metadata import version
from mindspore.train.metrics import HausdorffDistance, hausdorff_distance
erosion = hausdorff_distance.morphology.binary_erosion
import scipy, scipy.special
from scipy import linalg
from scipy.optimize import linear_sum_assignment
print(callable(linear_sum_assignment), erosion.__module__.split(".")[0], float(scipy.special.expit(0)))
print(float(linalg.cholesky([[4.0]])[0, 0]), scipy.__version__ == version("scipy"))
import scipy.ndimage
print(scipy.ndimage.morphology.binary_erosion is erosion)
"""
KINDS = """
import flux_db.model.late_scipy
from scipy.sparse import csr_matrix
print(isinstance(csr_matrix([[1]]), csr_matrix), isinstance(3, csr_matrix))
"""


def _run(code: str) -> list[str]:
    done = program.run([program.PYTHON, "-W", "ignore", "-c", code])
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_mindspore_and_mindone_do_not_import_it_and_whoever_uses_a_name_gets_the_real_one():
    assert _run(ENTERED + USED) == ["False", "True", "scipy", "0.5", "2.0", "True", "True"]


def test_a_name_from_before_knows_its_instances():
    assert _run(KINDS) == ["True", "False"]
