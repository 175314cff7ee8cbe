"""mindone's models are imported one by one, and nobody who asks for one can see the difference."""

import program

LAZY = """
import sys
from flux_db.model import lazy_mindone
{before}
print(lazy_mindone.install())
import mindone.transformers
print("mindone.transformers.models.bert" in sys.modules)
from mindone.transformers import BertModel, modeling_utils
from mindone.transformers.models.bert.modeling_bert import BertModel as same
print(BertModel is same, modeling_utils.__name__, hasattr(mindone.transformers, "NoSuchModel"))
"""


def _run(before: str) -> list[str]:
    done = program.run([program.PYTHON, "-c", LAZY.format(before=before)])
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "Config not found" not in line]


def test_a_model_is_imported_when_it_is_asked_for():
    assert _run("") == ["True", "False", "True mindone.transformers.modeling_utils False"]


def test_another_mindone_is_imported_in_the_ordinary_way():
    before = "lazy_mindone.TRIED = '0.6.0'"
    assert _run(before) == ["False", "True", "True mindone.transformers.modeling_utils False"]


STRUCTURE = """
import hashlib, sys
{before}
import transformers
from transformers.utils import import_utils
print(import_utils.fetch__all__.__name__)
found = {{name: sorted(map(str, names)) for name, names in transformers._import_structure.items()}} if hasattr(
    transformers, "_import_structure") else sorted(transformers._class_to_module.items())
print(len(found), hashlib.sha256(repr(found).encode()).hexdigest())
"""


def test_transformers_finds_the_same_names_in_less_text():
    quick, ordinary = (
        program.run([program.PYTHON, "-c", STRUCTURE.format(before=before)]).stdout.split()
        for before in ("from flux_db.model import lazy_mindone; lazy_mindone.install()", "")
    )
    assert (quick[0], ordinary[0]) == ("<lambda>", "fetch__all__")
    assert quick[1:] == ordinary[1:] and int(quick[1]) > 1000


DISTRIBUTIONS = """
import importlib.metadata
from flux_db.model import lazy_mindone
lazy_mindone.install()
from mindone.diffusers.utils import import_utils
print(len(vars(import_utils._package_map)))
print("PIL" in import_utils._package_map, import_utils._package_map == importlib.metadata.packages_distributions())
print(import_utils._is_package_available("PIL", get_dist_name=True)[0])
"""


def test_mindone_looks_for_distributions_when_it_needs_one():
    done = program.run([program.PYTHON, "-c", DISTRIBUTIONS])
    assert done.stdout.split() == ["0", "True", "True", "True"], done.stderr
