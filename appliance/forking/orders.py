"""What is said between the daemon and a process from which others are forked."""

from __future__ import annotations

from typing import Final

import msgspec

ORDER_BYTES: Final = 4096
"""Of one message, either way."""
MOST_DESCRIPTORS: Final = 3
"""That an order brings."""


class Fork(msgspec.Struct, frozen=True):
    """To the process, with the descriptors that the role gets: fork another. `scratch` is the
    folder for its temporary files; "": that of the process it is forked from."""

    number: int
    role: str
    scratch: str = ""


class Forked(msgspec.Struct, frozen=True):
    """The answer, with the pidfd of the new process; without one if it is gone already, or could
    not be forked: `error` says why then."""

    number: int
    pid: int
    error: str = ""
