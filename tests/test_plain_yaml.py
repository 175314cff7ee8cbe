"""YAML that somebody else wrote: never more objects than a file of settings has, and every complaint is a YAMLError."""

import time

import pytest
import yaml

from flux_db.plain_yaml import MOST_VALUES, load


def test_plain_yaml_and_modest_aliases_are_what_they_always_were():
    text = "a: &x [1, 2.5, yes, null, 2024-01-01, text]\nb: *x\nc: {<<: {d: 1}, e: 2}\n"
    assert load(text) == yaml.safe_load(text)
    assert load("") is None and load("# nothing") is None


def nested(levels, line):
    return "a0: &a0 {x: 1, y: 2}\n" + "".join(line.format(n, n - 1) for n in range(1, levels))


@pytest.mark.parametrize(
    ("text", "problem", "line"),
    [
        (nested(40, "a{0}: &a{0} [*a{1}, *a{1}]\n"), "aliases that expand to more than 20,000 values", 13),
        (nested(40, "a{0}: &a{0} {{<<: [*a{1}, *a{1}]}}\n"), "aliases that expand to more than 20,000 values", 13),
        ("a: &a [*a]", "an anchor that holds itself", 1),
        ("a: &a {b: {c: *a}}", "an anchor that holds itself", 1),
        ("[" + "a," * MOST_VALUES + "]", "more than 20,000 values", 1),
        ("[" * 50_000, "nested too deeply", None),
        ("{a: " * 50_000, "nested too deeply", None),
        ("a: 1\nb: " + "9" * 5000, "a value that cannot be read", 2),
        ("a: 0x" + "f" * 5000, "a value that cannot be read", 1),
        ("a: 2024-13-99", "a value that cannot be read", 1),
        ("a: !!bool perhaps", "a value that cannot be read", 1),
        ("a: !!int ''", "a value that cannot be read", 1),
        ("a: \x1b[2J", "the character #x001b is not allowed", None),
        ("a: \0", "the character #x0000 is not allowed", None),
        ("a: \ud800", "the character #xd800 is not allowed", None),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor for the tag", 1),
        ("? [a]\n: b", "found unhashable key", 1),
    ],
    ids=lambda value: ascii(value)[:24],
)
def test_what_explodes_or_cannot_be_read_is_refused_at_once(text, problem, line):
    begin = time.monotonic()
    with pytest.raises(yaml.MarkedYAMLError) as caught:
        load(text)
    assert caught.value.problem.startswith(problem)
    assert line == (caught.value.problem_mark and caught.value.problem_mark.line + 1)
    assert time.monotonic() - begin < 30  # a fraction of a second, on a machine with nothing else to do
