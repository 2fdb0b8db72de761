"""One page's dashboard: ``python -m tui.web.child URL``, driven through its pipes."""

from __future__ import annotations

import argparse
import os

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
    run(asked.url, key=key, readonly=asked.readonly, theme=asked.theme)


if __name__ == "__main__":
    main()
