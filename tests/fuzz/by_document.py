"""Requests made from the OpenAPI document by schemathesis: those it allows, and those it does not.

    python -m tests.fuzz.by_document --seconds 600

All of schemathesis' checks are on (`schemathesis.toml` beside this file): statuses, content types
and bodies of answers are as the document says, what it does not allow is refused, what it allows is
not, and nothing is a server's error but for those that docs/api.md lists (`checks.py`). Ids of
files and batches are often those of some that there are. The core's endpoints are asked: what front
ends answer is vLLM's, whose models allow more than they accept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

import httpx

from appliance.service.front_paths import FRONT_PATHS
from tests.fuzz.corpus import FORM, UPLOAD, message_batch
from tests.fuzz.running import ROOT, Target, running
from tests.fuzz.target import ANYTHING, MODELS, Held
from tests.patience import PATIENCE_SECONDS

_CONFIG: Final = Path(__file__).with_name("schemathesis.toml")
_FRONT: Final = "|".join(f"^{re.escape(path)}$" for path in sorted(FRONT_PATHS))
_ALL: Final = "examples,coverage,fuzzing"
_EXAMPLES: Final = 30
"""Cases of each kind that are drawn for an operation in one run."""
_OF_EACH: Final = 6
"""Files, batches and message batches that are made for a run, as it deletes some."""


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
        result, config = Path(folder, "report.json"), Path(folder, "schemathesis.toml")
        config.write_text(_CONFIG.read_text(encoding="utf-8") + _made(target), encoding="utf-8")
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(config)),
            *("run", f"{target.url}/api/openapi.json", "--checks", "all", "--no-color"),
            *("--seed", str(seed), "--max-examples", str(examples), "--phases", phases),
            *("--generation-database", "none", "--exclude-path-regex", _FRONT),
            *("--header", f"Authorization: Bearer {ANYTHING}"),
            *("--report-json-path", str(result)),
        ]
        hooks = {"SCHEMATHESIS_HOOKS": "tests.fuzz.checks", "PYTHONPATH": str(ROOT)}
        ran = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **hooks},
            capture_output=True,
            text=True,
            check=False,
        )
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


def _client(target: Target) -> httpx.Client:
    headers = {"Authorization": f"Bearer {ANYTHING}"}
    return httpx.Client(base_url=target.url, headers=headers, timeout=PATIENCE_SECONDS)


def _made(target: Target) -> str:
    """Make some files, batches and message batches; their ids as dictionaries of schemathesis."""
    ids: dict[str, list[str]] = {"files": [], "batches": [], "messages/batches": []}
    with _client(target) as client:
        for _ in range(_OF_EACH):
            answer = client.post("/v1/files", content=UPLOAD, headers={"Content-Type": FORM})
            if not answer.is_success:  # the store is full
                break
            ids["files"].append(answer.json()["id"])
            asked = {"input_file_id": ids["files"][-1], "endpoint": "/v1/chat/completions"}
            batch = client.post("/v1/batches", json={**asked, "completion_window": "24h"})
            ids["batches"].append(batch.json()["id"])
            batch = client.post("/v1/messages/batches", json=message_batch())
            ids["messages/batches"].append(batch.json()["id"])
    return "".join(
        f'\n[dictionaries."{kind}"]\nvalues = {json.dumps(made)}\n'
        f'\n[[operations]]\ninclude-path-regex = "^/v1/{kind}/"\n'
        f'parameters = {{ "path.id" = {{ dictionary = "{kind}", probability = 0.8 }} }}\n'
        for kind, made in ids.items()
        if made
    )


def rest(target: Target) -> Held:
    """What the target holds when operators' requests are undone, and batches had time to end."""
    with _client(target) as client:
        client.post("/api/instances/0/release").raise_for_status()
        for model in MODELS:
            client.post(f"/api/models/{model}/resume").raise_for_status()
    ends = time.monotonic() + PATIENCE_SECONDS
    while (held := target.held()).requests and time.monotonic() < ends:
        time.sleep(0.3)
    return held


def main() -> int:
    """Run for so long; the exit status tells whether any case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    asked = parser.parse_args()
    began = time.monotonic()
    cases = failures = 0
    seed = asked.seed
    with running(keys=True, ending=True) as target:
        while time.monotonic() - began < asked.seconds:
            outcome = run(target, seed=seed, examples=_EXAMPLES)
            cases, failures = cases + outcome.cases, failures + outcome.failures
            print(f"seed {seed}: {outcome.cases} cases, {outcome.failures} failures", flush=True)
            if outcome.failures:
                print(outcome.report)
            seed += 1
        held, complaints = rest(target), target.complaints()
    print(complaints, end="")
    print(f"{cases} cases, {failures} failures, {time.monotonic() - began:.0f} s; then {held}")
    return 1 if failures or complaints or held.requests else 0


if __name__ == "__main__":
    sys.exit(main())
