"""MindSpore's intermediate representation, read from the text that it writes with `MS_DEV_SAVE_GRAPHS=2`.

Only what questions about a graph need: the operators, their types and shapes, which of them belong to the backward,
which are computed a second time, and which results of the forward must be kept until then.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path

_BYTES = {
    "Float64": 8,
    "Int64": 8,
    "Float32": 4,
    "Int32": 4,
    "Float16": 2,
    "BFloat16": 2,
    "Bool": 1,
    "Int8": 1,
    "UInt8": 1,
}

LAST_PASS = "validate"
"""Of the front end, by MindSpore's name."""

# `%12(CNode_7) = PrimFunc_MatMul(%3, %4, Bool(0)) cnode_attrs: {...}`
_NODE = re.compile(r"\s*(%\w+)(?:\([^)]*\))?\s*=\s*(?:PrimFunc_)?([A-Za-z_0-9:@$]+)(.*)$")
_TENSOR = re.compile(r"Tensor\[(\w+)\]\]?, \(([^)]*)\)")

# The same memory under another name.
_VIEWS = frozenset({"Reshape", "ExpandDims", "TupleGetItem", "Depend", "Load"})
_NO_RESULT = frozenset({"MakeTuple", "UpdateState", "Assign", "Return", "return"})
# No kernels: the structure of the graph.
STRUCTURE = frozenset({"TupleGetItem", "MakeTuple", "Load", "UpdateState", "Depend", "Return", "return", "Reshape"})


@dataclass(frozen=True)
class TensorType:
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        count = 1
        for side in self.shape:
            count *= side
        return count * _BYTES[self.dtype]


@dataclass
class Node:
    name: str
    op: str
    inputs: tuple[str, ...]
    attributes: str
    """As written: what follows the inputs."""
    outputs: tuple[TensorType, ...] = ()
    input_types: tuple[TensorType, ...] = ()
    scope: str = ""
    """The cells that it is in, outermost first."""
    follows_gradient: bool = False
    """Whether it reads something of the backward: what a cell with a gradient of its own does has the cell's scope."""

    @property
    def is_repeated(self) -> bool:
        """Computed a second time, for the backward, instead of being kept."""
        return "duplicated" in self.attributes

    @property
    def is_backward(self) -> bool:
        # an AddN is a sum of gradients, also where it has lost its scope
        return self.follows_gradient or self.is_repeated or "Gradients" in self.scope or self.op == "AddN"

    @property
    def bytes(self) -> int:
        return sum(output.bytes for output in self.outputs)


@dataclass
class Graph:
    nodes: dict[str, Node] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def counts(self) -> Counter[str]:
        """How often each operator occurs."""
        return Counter(node.op for node in self)

    def kernels(self) -> int:
        """Operators that a device runs; views and the structure of the graph are free."""
        return sum(node.op not in STRUCTURE for node in self)

    def of(self, op: str) -> list[Node]:
        return [node for node in self if node.op == op]

    def kept(self) -> list[Node]:
        """Results of the forward that the backward reads: what is in memory between the two. Weights do not count."""
        found: dict[str, Node] = {}
        for reader in self:
            if not reader.is_backward or reader.op == "UpdateState":
                continue
            data = reader.inputs[:1] if reader.op == "Depend" else reader.inputs
            for source in (owner for name in data for owner in self._owners(name)):
                if not source.is_backward and not self._is_weight(source):
                    # of several results of an operator that one which is taken out
                    one = reader if reader.op == "TupleGetItem" and not source.outputs else source
                    found[one.name] = one
        return list(found.values())

    def live(self, beside: Set[str] = frozenset()) -> list[tuple[Node, int]]:
        """Each node in the order of the graph, and the bytes in memory while it runs: what it reads and makes, and what
        is read later. Weights do not count, nor do the nodes named in `beside`."""
        last = {owner: place for place, node in enumerate(self) for owner in self._read_by(node)}
        ends: dict[int, int] = {}
        steps, now = [], 0
        for place, node in enumerate(self):
            size = node.bytes if self._has_memory(node) and node.name not in beside else 0
            now += size
            steps.append((node, now))
            ends[last.get(node.name, place)] = ends.get(last.get(node.name, place), 0) + size
            now -= ends.pop(place, 0)
        return steps

    def _read_by(self, node: Node) -> set[str]:
        """Names of the nodes whose memory this one reads."""
        if node.op == "UpdateState":
            return set()
        waiting, found = list(node.inputs[:1] if node.op == "Depend" else node.inputs), set()
        while waiting:
            owner = self._memory(waiting.pop())
            if owner is not None and owner.op == "MakeTuple":
                waiting += owner.inputs
            elif owner is not None:
                found.add(owner.name)
        return found

    def _memory(self, name: str) -> Node | None:
        """As `_owner`, in the backward too."""
        node = self.nodes.get(name)
        while node is not None and not self._has_memory(node) and node.op in _VIEWS and node.inputs:
            if (above := self.nodes.get(node.inputs[0])) is None:
                break
            node = above
        return node

    def _has_memory(self, node: Node) -> bool:
        """Whether its result is neither a weight, nor another's memory under another name."""
        if node.op == "TupleGetItem":
            above = self.nodes.get(node.inputs[0]) if node.inputs else None
            return above is None or above.op not in _VIEWS | {"MakeTuple"}
        return node.op not in _VIEWS | _NO_RESULT

    def _owners(self, name: str) -> Iterator[Node]:
        node = self._owner(name)
        if node is not None and node.op == "MakeTuple" and not node.is_backward:
            for part in node.inputs:
                yield from self._owners(part)
        elif node is not None:
            yield node

    def _owner(self, name: str) -> Node | None:
        """The node whose memory `name` is, found through views."""
        node = self.nodes.get(name)
        while node is not None and node.op in _VIEWS and not node.is_backward and node.inputs:
            above = self.nodes.get(node.inputs[0])
            if node.op == "TupleGetItem" and (above is None or above.op not in _VIEWS):
                return node  # one of several results of its operator
            if above is None:
                return node
            node = above
        return node

    def _is_weight(self, node: Node) -> bool:
        above = self.nodes.get(node.inputs[0]) if node.inputs else None
        if node.op == "Depend":  # on a parameter, which is no node
            return above is None
        return (above if node.op == "TupleGetItem" and above else node).op in ("Load", "Assign", "TensorMove")


def newest(folder: Path) -> Path | None:
    """Of what MindSpore wrote into a folder, the graph as it is handed to the device's back end."""
    return max(folder.rglob(f"*_{LAST_PASS}_*.ir"), key=lambda file: file.stat().st_mtime_ns, default=None)


def parse(text: str) -> Graph:
    graph, node, number = Graph(), None, 0
    for line in text.splitlines():
        if line.startswith("subgraph @"):  # names start anew in each: a branch, for instance
            number += 1
        elif match := _NODE.match(line):
            inputs, attributes = _divide(match[3])
            names = tuple(f"{number}{name}" for name in re.findall(r"%\w+", inputs))
            node = Node(f"{number}{match[1]}", match[2], names, attributes)
            graph.nodes[node.name] = node
        elif node is not None:
            _complete(node, line.strip())
    for node in graph:  # in order: what a node reads is listed before it
        above = (graph.nodes[name] for name in node.inputs if name in graph.nodes)
        node.follows_gradient = any(reads.is_backward for reads in above)
    return graph


def _divide(text: str) -> tuple[str, str]:
    """`(inputs) attributes`, with brackets inside the inputs."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:place], text[place + 1 :]
    return text, ""


def _complete(node: Node, line: str) -> None:
    if line.startswith(": (") and "->" in line:
        given, _, result = line.rpartition("->")
        node.input_types, node.outputs = _types(given), _types(result)
    elif "Fullname with scope: " in line:
        node.scope = line.partition("scope: ")[2].strip("()")


def _types(text: str) -> tuple[TensorType, ...]:
    """Of single tensors; a tuple's parts have nodes of their own, which take them out."""
    return tuple(
        TensorType(dtype, tuple(int(side) for side in shape.split(",") if side.strip()))
        for dtype, shape in _TENSOR.findall(text)
    )
