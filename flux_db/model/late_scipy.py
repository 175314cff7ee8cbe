"""scipy, imported when it is used: MindSpore and mindone import it at their start for what this program never calls.

Import this before MindSpore. Until somebody uses one of its names, scipy and its packages are empty modules whose names
are placeholders; the first use of one imports the real scipy.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "scipy"


class _Late:
    """A placeholder for a name of scipy, before scipy is imported."""

    def __init__(self, module: str, name: str) -> None:
        self._place = module, name

    def _find(self) -> Any:
        module, name = self._place
        return getattr(_import_really(module), name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._find()(*args, **options)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._find(), attribute)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._find())


class _EmptyModules(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != NAME or (fullname == NAME and PathFinder.find_spec(NAME) is None):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def find(name: str) -> Any:
            if name in ("__version__", "__all__"):
                return getattr(_import_really(module.__name__), name)
            if name.startswith("__"):  # looked for in every module by those who go through them all, such as inspect
                raise AttributeError(name)
            return _Late(module.__name__, name)

        module.__getattr__ = find  # type: ignore[method-assign]


_finder = _EmptyModules()


def _import_really(name: str) -> ModuleType:
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
        for known in [known for known in sys.modules if known.partition(".")[0] == NAME]:
            del sys.modules[known]
    return importlib.import_module(name)


if NAME not in sys.modules:
    sys.meta_path.insert(0, _finder)
