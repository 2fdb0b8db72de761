"""The same run in another process, where sets of names have another order.

What depends on that order cannot be replayed from a journal.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from operator import attrgetter
from typing import Any

import msgspec

from appliance.errors import PolicyError
from appliance.testing.scenes import SCENES, Scene, true_lengths
from appliance.testing.trial import trial

LIMIT_SECONDS = 120.0


def make(kind: type, parameters: object, scene: Scene) -> object:
    """A policy for a run. One with an oracle gets the lengths of this run's answers."""
    made: Any = msgspec.convert(parameters, kind)
    if getattr(made, "oracle", False):
        made.learn_oracle(true_lengths(scene))
    return made


def importable(kind: type) -> bool:
    """Whether another process could find the class by its name."""
    module = sys.modules.get(kind.__module__)
    try:
        return attrgetter(kind.__qualname__)(module) is kind
    except AttributeError:
        return False


def digest_elsewhere(kind: type, parameters: object, scene: Scene) -> str:
    """Of the commands of the run in a new process, with other hashes of strings.

    Raises `PolicyError` with what it said if it failed.
    """
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    arguments = [kind.__module__, kind.__qualname__, scene.name]
    result = subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        input=msgspec.json.encode(parameters),
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=LIMIT_SECONDS,
        check=False,
    )
    if result.returncode:
        raise PolicyError(result.stderr.decode(errors="replace").strip())
    return result.stdout.decode().split()[-1]


def main(module: str, qualname: str, scene: str) -> None:
    """Prints the digest of a run; parameters come as JSON."""
    kind: type = attrgetter(qualname)(importlib.import_module(module))
    made = make(kind, msgspec.json.decode(sys.stdin.buffer.read()), SCENES[scene])
    sys.stdout.write(trial(made, SCENES[scene]).digest + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
