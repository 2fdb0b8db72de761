"""Policies in packages of their own, as pip leaves them: a module and its metadata."""

from __future__ import annotations

import itertools
from pathlib import Path

_numbers = itertools.count()

HEAD = """\
'''A policy from elsewhere.'''
import math, time
import msgspec
from appliance.hookspecs import hookimpl
from appliance.scheduling.policy_api import *

class Stranger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    share: float = 0.5
"""


def install(directory: Path, name: str, body: str, *, head: str = HEAD) -> None:
    """Install policy `name` in a directory that is, or will be, on the module search path.

    `body` are the lines of its class, indented by four.
    """
    module = f"stranger_{next(_numbers)}"
    (directory / f"{module}.py").write_text(head + body)
    metadata = directory / f"{module}-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.5\n")
    entry = f"[appliance.policies]\n{name} = {module}:Stranger\n"
    (metadata / "entry_points.txt").write_text(entry)
