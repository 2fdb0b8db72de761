"""An interrupt before the daemon runs ends the command as any signal does, without a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS

INTERRUPTED = """
import os, signal, sys

wanted, number = sys.argv[1], getattr(signal, sys.argv[2])
del sys.argv[1:3]

class WhenImported:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            os.kill(os.getpid(), number)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, WhenImported())
from appliance.__main__ import main
main()
"""
"""Runs the command line, and sends itself a signal when a module is loaded."""


@pytest.mark.parametrize("module", ["appliance.cli.main", "httpx", "appliance.serve"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_before_the_daemon_runs(
    module: str, name: str, tmp_path: Path, fake_checkpoint: Callable[..., Path]
) -> None:
    """While modules are loaded, and while the configuration is read."""
    fake_checkpoint()
    file = tmp_path / "appliance.toml"
    file.write_text(
        '[devices]\nkind = "cpu"\nmemory = "8MiB"\nhost_cache = "16MiB"\n'
        '[[model]]\nname = "tiny"\npath = "tiny"\nmax_context = 64\n',
        encoding="utf-8",
    )
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, name, "serve", "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (-getattr(signal, name), "")
