"""What a cell's graph is made from, as plain values: two cells with equal ones compile to the same graph.

Read from the cell itself and not from the settings that it was built by: its classes, its constants, the names and
shapes of its parameters, and so on through everything that it holds. Values of parameters are left out, because a graph
gets them when it runs. What cannot be read raises `Unreadable`, and such a cell has no fingerprint.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

# What the graph does not depend on: what MindSpore notes when a cell or a function is made and compiled, and where a
# model was loaded from.
_OUTSIDE = frozenset(
    {
        *("_create_time", "hash_obj", "_id", "_cell_init_args", "is_top_cell", "__parse_method__", "_init_flag"),
        *("arguments_key", "current_phase", "_phase", "_phase_cache", "_compile_phase", "_compile_cache", "_compiled"),
        *("_exist_objs", "_exist_names", "_lazy_construct_sig", "_jit_graph_name", "__compile_cell_hook__"),
        *("_is_check_and_refresh", "_has_mutable_args_list", "sequence_modified"),
        *("_name_or_path", "name_or_path", "_commit_hash"),
    }
)


class Unreadable(Exception):
    """An object whose influence on a graph is not known."""


def of_cell(cell: nn.Cell) -> Any:
    """Everything that the cell is made from, as nested lists of strings and numbers."""
    return _Reader().read(cell)


def of_inputs(values: Any) -> Any:
    """Tensors by shape and type, whose values the graph gets when it runs; anything else by its value."""
    if isinstance(values, Tensor) and not isinstance(values, Parameter):
        return ["input", list(values.shape), str(values.dtype)]
    if isinstance(values, list | tuple):
        return [type(values).__name__, *(of_inputs(value) for value in values)]
    return _Reader().read(values)


class _Reader:
    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        """Numbers of the objects that were read or are being read, by id."""
        self.kept: list[Any] = []
        """So that no id is used twice."""

    def read(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | str):
            return value
        if value is ...:
            return ["..."]
        if isinstance(value, float):
            return ["float", value.hex()]
        if id(value) in self.seen:
            return ["seen", self.seen[id(value)]]
        if isinstance(value, type | types.BuiltinFunctionType | types.ModuleType | ms.Type | np.dtype | enum.Enum):
            return [type(value).__name__, _name(value)]
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)
        return self._read_new(value)

    def _read_new(self, value: Any) -> Any:
        for kind, reader in self._readers():
            if isinstance(value, kind):
                return [_name(type(value)), reader(value)]
        raise Unreadable(_name(type(value)))

    def _readers(self) -> tuple[tuple[Any, Callable[[Any], Any]], ...]:
        return (
            (Parameter, lambda value: [value.name, list(value.shape), str(value.dtype), value.requires_grad]),
            # bytes, and no operator: this is read while MindSpore is about to compile
            (Tensor, lambda value: [list(value.shape), str(value.dtype), _digest(value.get_bytes())]),
            (np.ndarray | np.generic, lambda value: [list(value.shape), str(value.dtype), _digest(value.tobytes())]),
            (bytes | bytearray, _digest),
            (PurePath | complex | range | slice, str),
            (Mapping, self._mapping),
            (set | frozenset, lambda value: sorted(map(str, map(self.read, value)))),
            (list | tuple, lambda value: [self.read(item) for item in value]),
            (types.MethodType, lambda value: [self.read(value.__func__), self.read(value.__self__)]),
            (types.FunctionType, self._function),
            (functools.partial, lambda value: [self.read(value.func), self.read((value.args, value.keywords))]),
            (nn.Cell, self._cell),
            (ops.Primitive, lambda value: [value.name, self._mapping(value.attrs), self._mapping(vars(value))]),
            (object, self._object),
        )

    def _mapping(self, value: Mapping[Any, Any]) -> list[Any]:
        return [[self.read(name), self.read(item)] for name, item in value.items() if name not in _OUTSIDE]

    def _cell(self, cell: nn.Cell) -> Any:
        # MindSpore makes these when it first asks for them; the rest of the scope is the place that was compiled first
        late = ("_lazy_", "_func_graph_flags")
        own = {name: value for name, value in vars(cell).items() if not name.startswith(late) or value}
        return self._mapping({**own, "_scope": str(cell._scope).startswith("recompute_")})

    def _function(self, function: types.FunctionType) -> Any:
        # by its place and what it holds: the source is part of a version, or of this program's sources
        held = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
        place = [_name(function), function.__code__.co_firstlineno, *self._code(function.__code__)]
        return [*place, self.read(held), self.read(function.__defaults__), self.read(function.__kwdefaults__)]

    def _code(self, code: types.CodeType) -> list[Any]:
        constants = [self._code(c) if isinstance(c, types.CodeType) else self.read(c) for c in code.co_consts]
        return [_digest(code.co_code), list(code.co_names), constants]

    def _object(self, value: Any) -> Any:
        if hasattr(value, "__dict__"):
            return self._mapping(vars(value))
        if hasattr(type(value), "__members__"):  # an enumeration of MindSpore's C++
            return str(value)
        raise Unreadable(_name(type(value)))


def _name(value: Any) -> str:
    """Of a class, function, module or type."""
    if isinstance(value, ms.Type | np.dtype | enum.Enum):
        return str(value)
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
