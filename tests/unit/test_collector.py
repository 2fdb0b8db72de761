"""Garbage is collected in programs that import what tests share."""

from __future__ import annotations

import gc
import runpy
from pathlib import Path


def test_importing_what_tests_share_does_not_stop_the_collector() -> None:
    """The fuzzer imports it, too."""
    assert gc.isenabled()
    try:
        runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))
        assert gc.isenabled()
    finally:
        gc.enable()
