"""A rehearsal of what a GPU is to run, on a driver that computes nothing (``make gpu-dry``).

    python benchmarks/gpu_dry.py --out FOLDER --json FILE [SECTION...]

Builds the pretend driver (``tests/pretend``), runs sections of `gpu_lease` on it, and writes how
each ended, what its tests said, and the faults that the driver has seen. It says whether code paths
hold together, and what they leave behind. It says nothing about speed or tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu_lease
from benchmarks.provenance import made, write
from tests.pretend.build import build, site_packages

SECTIONS: Final = ("driver", "engines", "daemon", "ranks", "pool-smoke")
LIMIT_SECONDS: Final = 1200
"""Of a section. Kernels are compiled for the first time, and all share few processors."""
HOST_MIB: Final = "512"
"""Page-locked memory of tests: of a real machine's there is more."""
SAID: Final = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", default=SECTIONS, metavar="SECTION")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-dry/out"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    driver = options.out / "driver"
    build(driver, site_packages())
    result: dict[str, Any] = {
        "what": "a rehearsal on the pretend driver: no GPU, no kernels, no speed, no tokens",
        "seconds": "by a stopwatch, of a CPU that other work may share",
        **made(),
        "versions": {name: version(name) for name in ("vllm", "torch", "triton", "cupy-cuda13x")},
        "sections": {},
    }
    for name in options.sections:
        result["sections"][name] = told = rehearsed(name, options.out, driver)
        print(f"{name}: {json.dumps(told)}", flush=True)
        write(result, options.json)
    whole = all(one["status"] == 0 and not one["faults"] for one in result["sections"].values())
    print("all sections passed, no faults" if whole else "see the logs in", options.out)
    sys.exit(0 if whole else 1)


def rehearsed(name: str, out: Path, driver: Path) -> dict[str, Any]:
    """Run a section of `gpu_lease` on the driver: how it ended, and what was seen."""
    audit = out.resolve() / f"{name}.faults"
    for old in (audit, out / "summary.json"):
        old.unlink(missing_ok=True)
    lease = [sys.executable, str(Path(gpu_lease.__file__)), "--out", str(out)]
    lease += ["--limit", str(LIMIT_SECONDS), "--slow", name]
    began = time.monotonic()
    subprocess.run(
        ["bash", "-c", '. "$0"/env.sh && exec "$@"', str(driver.resolve()), *lease],
        env=os.environ
        | {"PRETEND_AUDIT": str(audit), "HOST_MIB": HOST_MIB, "OUT": str(out.resolve())},
        check=False,
        stdout=subprocess.DEVNULL,
    )
    summary = json.loads((out / "summary.json").read_text())[name]
    log = (out / f"{name}.log").read_text(errors="replace") if "seconds" in summary else ""
    return {
        "status": summary["status"],
        "seconds": round(time.monotonic() - began),
        **{key: summary[key] for key in ("why", "left_out") if key in summary},
        "tests": {what: int(count) for count, what in SAID.findall(last_line(log))},
        "faults": faults(audit),
    }


def last_line(log: str) -> str:
    """Where pytest has its totals."""
    return log.rstrip().rpartition("\n")[2]


def faults(audit: Path) -> dict[str, int]:
    """How often each kind of fault was seen: what no program may do, though a driver may let it
    pass."""
    if not audit.exists():
        return {}
    return dict(Counter(line.split("\t")[1] for line in audit.read_text().splitlines()))


if __name__ == "__main__":
    main()
