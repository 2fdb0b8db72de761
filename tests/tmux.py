"""A program in a terminal of tmux: keys go in, and what stands on its screen comes out."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


class Terminal:
    """One that is open."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def press(self, *keys: str) -> None:
        """By tmux's names, such as ``Enter``, ``Tab`` or ``C-s``; a letter is itself."""
        self._tmux("send-keys", *keys)

    def type(self, text: str) -> None:
        """A text as it is, whatever keys are called like it."""
        self._tmux("send-keys", "-l", text)

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-S", str(self._socket), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def terminal(
    folder: Path,
    command: Sequence[str],
    *,
    size: tuple[int, int] = (160, 48),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Terminal]:
    """A terminal that runs the command, of so many columns and lines, with a server of its own."""
    socket = folder / "tmux"
    start = ["tmux", "-S", str(socket), "-f", "/dev/null", "new-session", "-d"]
    start += ["-x", str(size[0]), "-y", str(size[1])]
    for name, value in (environment or {}).items():
        start += ["-e", f"{name}={value}"]
    # The size is the terminal's own, and not what stands in variables of whoever runs this.
    sized = ["env", "-u", "COLUMNS", "-u", "LINES", *command]
    subprocess.run([*start, shlex.join(sized)], check=True)
    try:
        yield Terminal(socket)
    finally:
        # It is gone by itself if its only program has ended.
        subprocess.run(["tmux", "-S", str(socket), "kill-server"], capture_output=True, check=False)
