"""Requests made from the OpenAPI document by schemathesis: those it allows, and those it does not.

    python -m tests.fuzz.by_document --cases 10000

All of schemathesis' checks are on (`schemathesis.toml` beside this file): statuses, content types
and bodies of answers are as the document says, what it does not allow is refused, what it allows is
not, and nothing is a server's error. The core's endpoints are asked: what front ends answer is
vLLM's, whose models allow more than they accept.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

from appliance.service.front_paths import FRONT_PATHS
from tests.fuzz.running import Target, running
from tests.fuzz.target import ANYTHING

_CONFIG: Final = Path(__file__).with_name("schemathesis.toml")
_FRONT: Final = "|".join(f"^{re.escape(path)}$" for path in sorted(FRONT_PATHS))
_ALL: Final = "examples,coverage,fuzzing"
_EXAMPLES: Final = 100
"""Cases of each kind that are drawn for an operation in one run."""


class Outcome(NamedTuple):
    """What came of a run: `report` is schemathesis' own, for people."""

    cases: int
    operations: int
    failures: int
    report: str


def run(target: Target, *, seed: int, examples: int, phases: str = _ALL) -> Outcome:
    """All operations of the document, each with `examples` cases at most in a phase that draws
    them, asked with the key that allows everything."""
    with tempfile.TemporaryDirectory() as folder:  # schemathesis leaves files where it runs
        result = Path(folder, "report.json")
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(_CONFIG)),
            *("run", f"{target.url}/api/openapi.json", "--checks", "all", "--no-color"),
            *("--seed", str(seed), "--max-examples", str(examples), "--phases", phases),
            *("--generation-database", "none", "--exclude-path-regex", _FRONT),
            *("--header", f"Authorization: Bearer {ANYTHING}"),
            *("--report-json-path", str(result)),
        ]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if not result.exists():
            raise RuntimeError(f"schemathesis did not run:\n{ran.stdout}{ran.stderr}")
        told = json.loads(result.read_bytes())
    cases = told["test_cases"]
    return Outcome(
        cases=cases["generated"],
        operations=told["operations"]["tested"],
        failures=cases["unique_failures"] + len(told["errors"]),
        report=ran.stdout,
    )


def main() -> int:
    """Run until there were enough cases; the exit status tells whether any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    wanted = parser.parse_args().cases
    began = time.monotonic()
    cases = failures = seed = 0
    with running(keys=True, ending=True) as target:
        while cases < wanted:
            seed += 1
            outcome = run(target, seed=seed, examples=_EXAMPLES)
            cases, failures = cases + outcome.cases, failures + outcome.failures
            print(f"seed {seed}: {outcome.cases} cases, {outcome.failures} failures", flush=True)
            if outcome.failures:
                print(outcome.report)
        held = target.held()
    print(f"{cases} cases, {failures} failures, {time.monotonic() - began:.0f} s; then {held}")
    return 1 if failures or held.requests else 0


if __name__ == "__main__":
    sys.exit(main())
