"""Writes a new policy: a small package that can be installed, with a parameter and tests."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

from appliance.errors import PolicyError
from appliance.hookspecs import API_VERSION, ENTRY_POINTS, HOOKS, PROJECT

NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
TAKEN = {*HOOKS, "use", "budget"}
"""Words that mean something else where [policy] takes names of policies."""


def write_policy(name: str, directory: Path) -> list[Path]:
    """Write the package of a policy into a new folder of its name in `directory`.

    Returns what was written. Raises `PolicyError` for a name that cannot be one, and when there is
    something of that name already.
    """
    if not NAME.fullmatch(name) or keyword.iskeyword(name) or name in TAKEN:
        raise PolicyError(
            f"{name!r} cannot be a policy's name: small letters, digits and _, a letter first,"
            " no word of Python and no key of [policy]"
        )
    root = directory / name
    if root.exists():
        raise PolicyError(f"{root} is there already")
    words = {
        "name": name,
        "module": f"{PROJECT}_{name}",
        "distribution": f"{PROJECT}-policy-{name.replace('_', '-')}",
        "kind": "".join(part.capitalize() for part in name.split("_") if part),
        "group": ENTRY_POINTS,
        "version": str(API_VERSION),
    }
    written = []
    for path, text in _FILES.items():
        target = root / Template(path).substitute(words)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(text).substitute(words), encoding="utf-8")
        written.append(target)
    return written


_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$distribution"
version = "0.1.0"
description = "A policy for the appliance: $name"
requires-python = ">=3.11"
# The appliance is there when the policy is: it is installed into the appliance's environment.
dependencies = []

[project.entry-points."$group"]
$name = "$module:$kind"

[tool.setuptools]
py-modules = ["$module"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""

_MODULE = '''\
"""$kind: the most urgent first, a turn for every model.

Say here what the policy is for and where it comes from; `appliance policy list` shows the first
line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from appliance.hookspecs import hookimpl
from appliance.scheduling.policy_api import Admitted, InstanceView, PlannedTurn


class $kind(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Its parameters, as in the table [policy.$name]. All have a default, and none changes: what it
    remembers are attributes that `__post_init__` makes, and that are no fields."""

    api_version: ClassVar[int] = $version
    """Of the hooks it was written for."""

    turn_seconds: Annotated[float, Meta(gt=0, le=60)] = 2.0
    """How long a model decodes before the next one does."""

    # Hooks that are not here are answered by the next policy, at last by the built-in. All of
    # them: docs/hooks.md of the appliance. Arguments that are not needed may be left out.

    @hookimpl
    def admit(self, instance: InstanceView) -> Admitted:
        """Asked when several groups of prompts wait: the earliest deadline first."""
        groups = instance.groups
        return sorted(range(len(groups)), key=lambda number: groups[number].deadline)

    @hookimpl
    def round(self, instance: InstanceView) -> Sequence[PlannedTurn]:
        """Asked when every model had its turn: which ones are next, and for how long."""
        runnable = [batch for batch in instance.batches if batch.runnable]
        runnable.sort(key=lambda batch: batch.deadline)
        return [
            PlannedTurn(model=batch.model, quota_seconds=self.turn_seconds) for batch in runnable
        ]
'''

_TEST = '''\
"""What $name promises. `questions` are some that the real machine asked."""

from __future__ import annotations

import pytest
from $module import $kind

from appliance.testing import HookCall, check, questions


def test_it_can_be_used() -> None:
    """It keeps the rules, and every request of a real run under it ends."""
    report = check($kind)

    assert report.ok, str(report)


@pytest.mark.parametrize("question", questions("round")[:20])
def test_a_turn_is_as_long_as_it_was_set(question: HookCall) -> None:
    """Every model that can run gets the time that the parameter says."""
    instance = question.views["instance"]

    turns = $kind(turn_seconds=0.5).round(instance)

    assert {turn.model for turn in turns} == {b.model for b in instance.batches if b.runnable}
    assert all(turn.quota_seconds == 0.5 for turn in turns)
'''

_README = """\
# $name

A policy for the appliance.

```
appliance policy test .                                     # does it keep the rules?
python -m pytest                                            # does it do what it promises?
pip install --no-deps --no-build-isolation .                # into the appliance's environment
appliance policy set $name --param $name.turn_seconds=1     # it decides from now on
appliance policy rollback                                   # as it was before
```

| parameter | default | meaning |
|---|---|---|
| `turn_seconds` | 2.0 | how long a model decodes before the next one does |
"""

_IGNORED = """\
__pycache__/
*.egg-info/
build/
"""

_FILES = {
    "pyproject.toml": _PYPROJECT,
    "$module.py": _MODULE,
    "test_$name.py": _TEST,
    "README.md": _README,
    ".gitignore": _IGNORED,
}
