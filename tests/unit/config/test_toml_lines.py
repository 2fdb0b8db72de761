"""Keys are found on their lines, in every form that TOML has for them."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from appliance.config.toml_lines import KeyPath, LineMap, dotted

TEXT = '''\
top = 1
a.b.c = 2
["quoted table"]
'single' = 3
[outer.inner]  # comment
text = """
not_a_key = 4
[not.a.table]
"""
list = [
  "x = 1",
]
after = 5
[[row]]
name = "one = 1"
in_line = { p = 1, "q r" = "s = 2, t = 3", u = { v = 1 } }
[row.sub]
deep = 6
[[row]]
name = "two"
[row.sub]
deep = 7
'''


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (("top",), 1),
        (("a", "b", "c"), 2),
        (("a", "b"), 2),
        (("quoted table", "single"), 4),
        (("outer", "inner"), 5),
        (("outer", "inner", "text"), 6),
        (("outer", "inner", "list"), 10),
        (("outer", "inner", "after"), 13),
        (("outer",), 5),
        (("row",), 14),
        (("row", 0), 14),
        (("row", 0, "name"), 15),
        (("row", 0, "in_line", "p"), 16),
        (("row", 0, "in_line", "q r"), 16),
        (("row", 0, "sub", "deep"), 18),
        (("row", 1), 19),
        (("row", 1, "name"), 20),
        (("row", 1, "sub", "deep"), 22),
    ],
)
def test_keys_are_found(key: KeyPath, line: int) -> None:
    """Tables, dotted and quoted keys, arrays of tables and inline tables."""
    value: Any = tomllib.loads(TEXT)
    for part in key:
        value = value[part]  # the case is about a key that the file has

    assert LineMap(TEXT).line(key) == line


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (("absent",), 1),
        (("outer", "inner", "not_a_key"), 5),
        (("row", 1, "absent", "deeper"), 19),
        (("row", 0, "in_line", "t"), 16),
    ],
)
def test_what_is_absent_has_the_line_of_its_table(key: KeyPath, line: int) -> None:
    """Text in strings is no key; an absent key is answered with what is around it."""
    assert LineMap(TEXT).line(key) == line


def test_paths_are_shown_as_people_write_them() -> None:
    """Dots between keys, brackets around indexes."""
    assert dotted(("model", 0, "slo", "ttft")) == "model[0].slo.ttft"
