"""Child processes that run our modules: how they are started, what they may and what they see, and
which go when memory runs out."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

WORKER_OOM_SCORE: Final = 500
"""Requests outlive their worker, so it goes first."""
FRONT_END_OOM_SCORE: Final = 300
"""A front end takes its streams along; the daemon would take everything."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SET_NAME: Final = 15
_F_SETSIG: Final = 10
_SECRET: Final = re.compile(
    r"(^|_)(API_?KEY|ACCESS_KEY|PRIVATE_KEY|TOKEN|SECRET|CREDENTIALS?)(_|$)"
    r"|PASSWORD|PASSWD|PASSPHRASE|_PWD$",
    re.I,
)
_URL_WITH_PASSWORD: Final = re.compile(r"://[^/?#\s]*:[^/?#\s]*@")
_OOM_SCORE: Final = Path("/proc/self/oom_score_adj")
_AUTOGROUP: Final = Path("/proc/self/autogroup")
_LOWEST_PRIORITY: Final = 19


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """What starts `module` with this interpreter.

    With ``-P``: with ``-m`` alone Python looks for modules in the working directory first, so a
    `msgspec.py` that lies there would run with the daemon's rights.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a child is given: those whose names say that they are secrets (`HF_TOKEN`,
    `AWS_SECRET_ACCESS_KEY`, …), and URLs with a password (of a proxy, a database), are the
    daemon's alone. What a child reads comes from clients, and vLLM is more code than ours."""
    return {
        name: value
        for name, value in environment.items()
        if not _SECRET.search(name) and not _URL_WITH_PASSWORD.search(value)
    }


def forbid_new_privileges() -> None:
    """No program that this process starts has more rights than it, nor has any process that is
    forked from it. Not for workers: CUDA's driver may start one to make its devices."""
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def die_with_writer(pipe: int) -> None:
    """Have the kernel kill this process, whatever it does then, when the other end of a pipe is
    closed: so it ends with a process that is not its parent. Nothing may be written into the pipe,
    and no other process may use this end of it for the same."""
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it was closed before
        os.kill(os.getpid(), signal.SIGKILL)


def name_process(name: str) -> None:
    """Have `ps` and `top` show a name of up to 15 bytes. What is forked has the command line of
    what it is forked from."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def forbid_core_dumps() -> None:
    """Neither this process nor what it starts leaves an image of its memory when it crashes: there
    would be prompts in it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def go_before_the_daemon(score: int) -> None:
    """Have the kernel end this process rather than the daemon when memory runs out: `score` is its
    `oom_score_adj`, from 0 to 1000. Without effect where the system does not let it be raised, or
    has set a higher one."""
    with contextlib.suppress(OSError, ValueError):
        if int(_OOM_SCORE.read_text()) < score:
            _OOM_SCORE.write_text(str(score))


def be_last_for_processors() -> None:
    """Have every other process of this machine go first. Where the kernel groups processes by
    session (``sched_autogroup``), a niceness only counts within the group, so that of a session
    that this process leads is lowered, too. Without effect on groups where the system has none, or
    refuses."""
    os.nice(_LOWEST_PRIORITY)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            _AUTOGROUP.write_text(str(_LOWEST_PRIORITY))
