"""One page's dashboard: ``python -m tui.web.child URL``, driven through its pipes."""

from __future__ import annotations

import argparse
import os
import select
import sys
from threading import Thread

from tui.start import run

KEY_VARIABLE = "APPLIANCE_API_KEY"
"""Others can read the command line of a process, but not its environment."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--theme", required=True)
    parser.add_argument("--readonly", action="store_true")
    asked = parser.parse_args()
    key = os.environ.pop(KEY_VARIABLE, None)
    Thread(target=_end_with_server, daemon=True).start()
    run(asked.url, key=key, readonly=asked.readonly, theme=asked.theme)


def _end_with_server() -> None:
    """A killed server does not ask this process to end; the only sign is that the pipe closes."""
    pipe = select.poll()
    pipe.register(sys.stdin.fileno(), 0)  # nothing but that
    pipe.poll()
    os._exit(1)


if __name__ == "__main__":
    main()
