"""Who may load what, checked in fresh processes, and that no test file is empty.

The contracts on imports are in pyproject.toml (`lint-imports`); this looks at what really happens.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS

TESTS = Path(__file__).parents[1]
ENGINES = ("torch", "vllm", "transformers")

LIGHT = [
    "appliance.api.app",
    "appliance.checkpoints.checkpoint",
    "appliance.cli.main",
    "appliance.config.loader",
    "appliance.testing",
    "appliance.daemon.daemon",
    "appliance.demo.checkpoints",
    "appliance.gateway.sessions",
    "appliance.journal",
    "appliance.lab.cli",
    "appliance.lab.experiments.metrics",
    "appliance.plugins.aegaeon",
    "appliance.plugins.serverlessllm",
    "appliance.policies.loader",
    "appliance.cli.policies",
    "appliance.daemon.policy_history",
    "appliance.scheduling.machine",
    "appliance.serve",
    "appliance.worker.frames",
    "appliance.worker.worker",
    "tui",
]


def loaded_by(module: str) -> set[str]:
    """Top-level packages in `sys.modules` after a new interpreter imported the module."""
    code = f"import {module}, sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    return set(result.stdout.split())


@pytest.mark.parametrize("module", LIGHT)
def test_no_engine_library_is_loaded(module: str) -> None:
    """What decides, answers, reads or supervises starts without torch, vLLM and transformers."""
    assert loaded_by(module).isdisjoint(ENGINES)


def test_scheduling_loads_no_input_or_output() -> None:
    """The machine is sans-IO: importing it loads no event loop, web framework or HTTP client."""
    loaded = loaded_by("appliance.scheduling.machine")

    assert "appliance" in loaded
    assert loaded.isdisjoint({"asyncio", "socket", "logging", "litestar", "uvicorn", "httpx"})


def test_opentelemetry_is_loaded_by_whom_it_is_for() -> None:
    """Not by a daemon that traces nothing."""
    assert "opentelemetry" not in loaded_by("appliance.serve")
    assert "opentelemetry" in loaded_by("appliance.observability.tracing")


def test_tui_loads_nothing_of_the_appliance() -> None:
    """The TUI knows the daemon over HTTP only."""
    assert "appliance" not in loaded_by("tui")


@pytest.mark.parametrize("module", ["appliance.config.loader", "appliance.cli.main"])
def test_import_has_no_side_effects(module: str) -> None:
    """Importing prints nothing and warns of nothing."""
    result = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:appliance", "-c", f"import {module}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )

    assert (result.stdout, result.stderr) == ("", "")


def count_tests(path: Path) -> int:
    """How many tests pytest would collect from a file: functions, methods and state machines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = 0
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        functions += sum(
            isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
            and member.name.startswith("test_")
            for member in members
        )
        # hypothesis: `TestMachine = Machine.TestCase`
        functions += isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id.startswith("Test") for target in node.targets
        )
    return functions


@pytest.mark.parametrize(
    "path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: str(path.relative_to(TESTS))
)
def test_every_test_file_holds_a_test(path: Path) -> None:
    """A file that collects nothing passes without having looked at anything."""
    assert count_tests(path) > 0
