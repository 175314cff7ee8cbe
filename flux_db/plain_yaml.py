"""YAML that somebody else wrote, within limits: a few lines of it may expand to more objects than memory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from flux_db.files import read_text

# A file of settings has about a hundred values, and every prompt to draw is one more.
MOST_VALUES = 20_000
LARGEST_BITS = 64


class Loader(yaml.SafeLoader):
    """SafeLoader that stops at too many values, and whose every complaint is a YAMLError that knows the line."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        self._values += 1
        if self._values > MOST_VALUES:
            raise _problem(f"more than {MOST_VALUES:,} values", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            # written in hexadecimal it may have any length, and later cannot be shown
            if isinstance(value, int) and value.bit_length() > LARGEST_BITS:
                raise ValueError
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # a number of 5,000 digits, the 99th of a month, !!bool perhaps
            raise _problem("a value that cannot be read", node.start_mark) from None
        return value


class SingleKeys(Loader):
    """Refuses a key given twice, where PyYAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        first = {key.value: key for key in reversed(keys)}
        for key in keys:
            if key is not first[key.value]:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
        return super().construct_mapping(node, deep)


def load(text: str, loader: type[Loader] = Loader) -> Any:
    """The one document of the text; a yaml.MarkedYAMLError with `problem` if there is anything wrong with it."""
    try:
        reader = loader(text)
        node = reader.get_single_node()
        if node is None:
            return None
        _count(node, {}, set())
        return reader.construct_document(node)
    except yaml.reader.ReaderError as error:
        raise _problem(f"the character #x{error.character:04x} is not allowed", None) from None
    except RecursionError:
        raise _problem("nested too deeply", None) from None


def read_mapping(path: Path) -> dict[str, Any]:
    """The values of a file by their names; none if it cannot be read."""
    try:
        content = load(read_text(path))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {str(name): value for name, value in content.items()} if isinstance(content, dict) else {}


def _count(node: yaml.Node, known: dict[int, int], within: set[int]) -> int:
    """How many values the node has, if every alias is written out."""
    if id(node) in within:
        raise _problem("an anchor that holds itself", node.start_mark)
    if id(node) not in known:
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        known[id(node)] = 1 + sum(_count(child, known, {*within, id(node)}) for child in children)
        if known[id(node)] > MOST_VALUES:
            raise _problem(f"aliases that expand to more than {MOST_VALUES:,} values", node.start_mark)
    return known[id(node)]


def _problem(text: str, mark: yaml.Mark | None) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=mark)
