"""mindone without the 200 models that this program does not use.

mindone imports every model it has in order to offer four of them, which takes most of the program's start. Here the
`__init__.py` of its largest packages run as they are, except that an import from inside the package waits until
somebody asks for one of its names. Whoever asks gets the same object. Another mindone than the one that was tried is
imported in the ordinary way.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import sys
from collections import UserDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

TRIED = "0.5.0"
_PACKAGES = (
    "mindone.models",
    "mindone.trainers",
    "mindone.transformers",
    "mindone.transformers.models",
    "mindone.diffusers.models.transformers",
)
_DEFER = "__defer__"
_SLOW_READER = "transformers.utils.import_utils"
_LISTS_DISTRIBUTIONS = "mindone.diffusers.utils.import_utils"


def install() -> bool:
    """Call it before mindone is imported. Returns whether its models will be imported one by one."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    if _version() != TRIED or any(package in sys.modules for package in _PACKAGES):
        return False
    sys.meta_path.insert(0, _Finder())
    return True


def _version() -> str | None:
    try:
        return importlib.metadata.version("mindone")
    except importlib.metadata.PackageNotFoundError:
        return None


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname not in _LOADERS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _LOADERS[fullname](spec.loader)
        return spec


class _QuickReader(Loader):
    """transformers reads all its 2,800 sources at its start for the names that they export, line by line; those names
    are in the last lines, so it is given no more than these."""

    def __init__(self, ordinary: SourceFileLoader) -> None:
        self.ordinary = ordinary

    def exec_module(self, module: ModuleType) -> None:
        self.ordinary.exec_module(module)
        read_whole = getattr(module, "fetch__all__", None)
        if read_whole is not None:
            module.fetch__all__ = lambda source: read_whole(source[source.rfind("\n__all__") + 1 :])


class _Distributions(UserDict):
    """Which distributions a package is from: asked of all that are installed, when the first one is looked up."""

    def __init__(self) -> None:
        pass  # no data yet

    @cached_property
    def data(self) -> Mapping[str, list[str]]:
        return _packages_distributions()


_packages_distributions = importlib.metadata.packages_distributions


class _LateLister(Loader):
    """mindone reads the file list of every installed distribution at its start, for packages that are not used here."""

    def __init__(self, ordinary: SourceFileLoader) -> None:
        self.ordinary = ordinary

    def exec_module(self, module: ModuleType) -> None:
        importlib.metadata.packages_distributions = _Distributions
        try:
            self.ordinary.exec_module(module)
        finally:
            importlib.metadata.packages_distributions = _packages_distributions


class _Loader(Loader):
    def __init__(self, ordinary: SourceFileLoader) -> None:
        self.ordinary = ordinary

    def exec_module(self, module: ModuleType) -> None:
        # some of mindone's models count on mindone.transformers.trainer, now deferred, having imported this
        importlib.import_module("transformers.models.auto.modeling_auto")
        path = self.ordinary.path
        tree = _DeferImports().visit(ast.parse(self.ordinary.get_data(path), path))
        deferred = _Deferred(module)
        setattr(module, _DEFER, deferred.add)
        module.__getattr__ = deferred.find  # type: ignore[method-assign]
        exec(compile(ast.fix_missing_locations(tree), path, "exec"), module.__dict__)


class _DeferImports(ast.NodeTransformer):
    """`from .models.clip import A, B` and `from . import clip` become calls that only note the names."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        if node.level != 1 or any(alias.asname for alias in node.names):
            return node
        names = ast.Constant(tuple(alias.name for alias in node.names))
        return ast.Expr(ast.Call(ast.Name(_DEFER, ast.Load()), [ast.Constant(node.module), names], []))


class _Deferred:
    """Names of a package that are imported when they are asked for."""

    def __init__(self, package: ModuleType) -> None:
        self.package = package
        self.sources: dict[str, str | None] = {}
        """Name -> the module that has it, or None if the name is a module itself."""
        self.stars: list[str] = []
        """Modules all of whose names were imported: asked last, because that imports them."""

    def add(self, module: str | None, names: Sequence[str]) -> None:
        if module is not None:  # importing from a module also makes it an attribute of the package
            self.sources.setdefault(module.partition(".")[0], None)
        if names == ("*",):
            self.stars.append(str(module))
        else:
            self.sources.update(dict.fromkeys(names, module))

    def find(self, name: str) -> Any:
        """The module's `__getattr__`: called for names that are not there yet."""
        package = self.package.__name__
        if name in self.sources:
            source = self.sources[name]
            module = importlib.import_module(f"{package}.{source or name}")
            value = module if source is None else getattr(module, name)
        else:
            value = self._find_in_stars(name)
        setattr(self.package, name, value)
        return value

    def _find_in_stars(self, name: str) -> Any:
        for star in () if name.startswith("_") else reversed(self.stars):
            module = importlib.import_module(f"{self.package.__name__}.{star}")
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"module {self.package.__name__!r} has no attribute {name!r}")


_LOADERS = dict.fromkeys(_PACKAGES, _Loader) | {_SLOW_READER: _QuickReader, _LISTS_DISTRIBUTIONS: _LateLister}
