"""An interrupt before the daemon runs, or after, ends the command at once, without a traceback."""

from __future__ import annotations

import os
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
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
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


@pytest.mark.parametrize(
    ("command", "name"),
    [*(("serve", name) for name in ("SIGINT", "SIGTERM", "SIGHUP")), ("init", "SIGTERM")],
)
def test_no_folder_is_left(
    command: str, name: str, tmp_path: Path, fake_checkpoint: Callable[..., Path]
) -> None:
    """A configuration that is for one run only, in a folder of temporary files."""
    (tmp_path / "temporary").mkdir()
    fake_checkpoint()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    module = "appliance.serve" if command == "serve" else "pynvml"
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, name, command, str(tmp_path / "tiny")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        env=environment,
        cwd=tmp_path,
    )

    assert (ended.returncode, ended.stderr) == (-getattr(signal, name), "")
    assert list((tmp_path / "temporary").iterdir()) == []


HANGING = """
import asyncio, threading
from appliance.serve import _loop_factory, end_at_signals

async def life():
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    end_at_signals(0)

with asyncio.Runner(loop_factory=_loop_factory()) as runner:
    runner.run(life())
    print("over", flush=True)
"""
"""A life that is over, and whose end waits for what does not come."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_when_only_the_end_is_left(number: signal.Signals) -> None:
    """A signal ends the process at once, with the status that it would have had."""
    with subprocess.Popen(
        [sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ending:
        assert ending.stdout is not None
        assert ending.stdout.readline() == "over\n"
        ending.send_signal(number)
        _, told = ending.communicate(timeout=PATIENCE_SECONDS)

    assert (ending.returncode, told) == (0, "")
