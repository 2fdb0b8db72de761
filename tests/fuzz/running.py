"""A target in a process of its own, from its start to its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from tests.fuzz.target import Held
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
_ERROR: Final = re.compile(r"^ERROR.*\n(?:(?!WARNING|ERROR|INFO|DEBUG).*\n)*", re.MULTILINE)


class Target:
    """A running target. What it logs goes to a file."""

    def __init__(self, process: subprocess.Popen[bytes], log: BinaryIO) -> None:
        self._process = process
        self._log = log
        self.port = self.held().port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complaints(self) -> str:
        """The errors that it has logged, with their tracebacks; the first of them."""
        self._log.seek(0)
        logged = self._log.read().decode(errors="replace")
        return "".join(_ERROR.findall(logged)[:5])

    def held(self) -> Held:
        """What it holds now. Raises `RuntimeError` if it is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # nothing will be read, either
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise RuntimeError(f"the target ended with status {status}: {self._end_of_log()}")
        return msgspec.json.decode(line, type=Held)

    def _end_of_log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]


@contextmanager
def running(*, keys: bool = False, ending: bool = False) -> Iterator[Target]:
    """A target of its own; it has to end well. With `keys` it answers only those who have one. When
    it is `ending`, so do all its streams."""
    command = [sys.executable, "-m", "tests.fuzz.target"]
    command += [f"--{name}" for name, wanted in (("keys", keys), ("ending", ending)) if wanted]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
    ):
        try:
            yield Target(process, log)
            assert process.stdin is not None
            process.stdin.close()
            status = process.wait(PATIENCE_SECONDS)
            assert status == 0, f"the target ended with status {status}"
        finally:
            process.kill()
