"""Everything the appliance raises on purpose.

    ApplianceError
    +-- ConfigError          a configuration cannot be used; lists every problem
    +-- CheckpointError      a checkpoint directory cannot be served
    +-- PullError            a model cannot be fetched: where it is, or what is there
    +-- KeysError            a file of API keys cannot be used, or a change of it cannot be made
    |   +-- KeyExists, KeyNotFound, KeyFieldError, OrganizationNotFound, OrganizationInUse
    |   +-- KeysReadOnly     it is shared by several boxes, and changed elsewhere
    +-- PolicyError          a policy cannot be loaded
    |   +-- PolicyChoiceError  a choice of policies cannot be used; lists every problem
    +-- CeilingsError        what a machine can do was not measured, or not on this machine
    +-- KvFolderError        the folder for KV on disk cannot be used
    +-- LedgerError          the books of a memory tier do not balance: a defect, never a shortage
    +-- LabError             a simulation cannot be made, or what it simulates cannot be
    +-- IllegalTransition    something tried to live a life that is not in its table: a defect

The process that meets a defect stops; everything else is answered.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class ApplianceError(Exception):
    """Base of the appliance's own errors."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration file: where it is, and what to do about it."""

    file: str
    line: int
    key: str
    wrong: str
    remedy: str
    needed_bytes: int = 0
    """What a model needs that has no room, if that is what is wrong."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.key}: {self.wrong}; {self.remedy}"


class ConfigError(ApplianceError):
    """A configuration cannot be used. `problems` is everything wrong with it, in file order."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class CheckpointError(ApplianceError):
    """A checkpoint directory cannot be served; the message names the file and what is wrong."""

    remedy = "give the directory of a whole checkpoint in safetensors format"

    @property
    def wrong(self) -> str:
        """The message without a remedy."""
        return str(self)


class RemediedCheckpointError(CheckpointError):
    """The same, with a remedy of its own."""

    def __init__(self, wrong: str, remedy: str) -> None:
        super().__init__(f"{wrong}; {remedy}")
        self._wrong = wrong
        self.remedy = remedy

    @property
    def wrong(self) -> str:
        return self._wrong


class PullError(ApplianceError):
    """A model cannot be fetched; the message says what is wrong with where it is, or what is
    there."""


class KeysError(ApplianceError):
    """A file of API keys cannot be used, or a change of it cannot be made."""


class KeysReadOnly(KeysError):
    """The file of keys is not to be changed here."""

    def __init__(self, path: object) -> None:
        super().__init__(
            f"{path} is read only here (api.keys_read_only), as several boxes have it: change it "
            "where it comes from, with `appliance key ... --file FILE`, and put the changed file "
            "in place of this one by a rename"
        )


class PolicyError(ApplianceError):
    """A policy cannot be loaded, or none answers a question."""


@dataclass(frozen=True, slots=True)
class ChoiceProblem:
    """One thing wrong with a choice of policies: at which key, and what to do about it."""

    key: tuple[str, ...]
    wrong: str
    remedy: str

    def __str__(self) -> str:
        return f"{'.'.join(self.key)}: {self.wrong}; {self.remedy}"


class PolicyChoiceError(PolicyError):
    """A choice of policies cannot be used. `problems` is everything wrong with it."""

    def __init__(self, problems: Sequence[ChoiceProblem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class CeilingsError(ApplianceError):
    """There are no ceilings to be used, or they cannot be measured; the message says why, and what
    to do."""


class KvFolderError(ApplianceError):
    """The folder for KV on disk cannot be used; the message says why, and what to do."""


class LedgerError(ApplianceError):
    """The books of a memory tier do not balance."""


class FleetError(ApplianceError):
    """Boxes cannot be put together as was asked, or one does not let itself be looked at."""


class LabError(ApplianceError):
    """A simulation cannot be made of what was given, or a command asked for what cannot be."""


class IllegalTransition(ApplianceError):
    """A lifecycle was to take a step that its table does not have."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant, or all there are."""
    known = list(known)
    if close := closest(word, known):
        return f"did you mean {close}?"
    return f"use {alternatives(known)}" if known else "remove it"


def closest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant; empty if none is near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), "")


def alternatives(words: Iterable[object]) -> str:
    """ "a, b or c"."""
    *rest, last = [str(word) for word in words]
    return f"{', '.join(rest)} or {last}" if rest else last


class NotSaved(Exception):
    """A change that was to last cannot be written down; nothing was changed."""


class FilesLeft(Exception):
    """A model was removed, but its files could not be deleted."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model {model!r} does not exist any more, but its files do: {reason}")


class KeyExists(KeysError):
    """There is a key of this name already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is a key {name!r} already")


class KeyNotFound(KeysError):
    """There is no key of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no key {name!r}")


class OrganizationNotFound(KeysError):
    """There is no organization of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no organization {name[:64]!r}")


class OrganizationInUse(KeysError):
    """An organization has keys, so it cannot be removed."""

    def __init__(self, name: str, keys: Sequence[str]) -> None:
        others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        super().__init__(
            f"the organization {name!r} has keys: {keys[0]!r}{others}; revoke them, or assign them "
            "to another one, first"
        )


class KeyFieldError(KeysError):
    """No key can be as it is wanted: what is wrong with one of its fields, and how it would be
    right."""

    def __init__(self, field: str, wrong: str) -> None:
        super().__init__(f"{field}: {wrong}")
        self.field = field
        self.wrong = wrong
