"""All that a borrowed GPU is to measure, in sections that each end well within ten minutes.

    python3 benchmarks/gpu_lease.py                              the calls of a lease, in order
    python3 benchmarks/gpu_lease.py --out "$OUT" --call A        run the sections of a call
    python3 benchmarks/gpu_lease.py --out "$OUT" SECTION...      run these, in this order
    python3 benchmarks/gpu_lease.py --list                       what there is

Every section is a process of its own with a limit; what it prints goes to ``SECTION.log``, what it
measures to ``SECTION.json`` in the folder `--out`, and ``summary.json`` says how each ended. A
section that fails or runs out of time does not keep the next ones. `--limit` bounds all of them
together: a section is cut short at it, and left for another call if 20 seconds or less remain.
What passed in an earlier call is not run again, if its folder is named with `--before`.
On the pretend driver (``tests/pretend``) sections are small, and each says what it leaves out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.provenance import PRETENDS

ROOT: Final = Path(__file__).parents[1]
LEAST_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Section:
    """One process. ``{json}`` in its command is the file that it writes."""

    what: str
    seconds: float
    command: tuple[str, ...]
    pretend: tuple[str, ...] | None = None
    """The command on the pretend driver, if it is another one there."""
    left_out: str = ""
    """What a run on the pretend driver does not say. Without `pretend`, it is all of it, and the
    section is not run there."""


TEST: Final = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
SMALL_POOL: Final = (
    "unmapping while the next model computes, as a kernel may touch anything there; which tokens "
    "they are needs arithmetic"
)
TOO_LARGE: Final = "it is there for its size, which a CPU has no memory for"
SECTIONS: Final = {
    "memory": Section(
        "slabs, streams, events and kernels on the driver itself",
        240,
        (*TEST, "tests/gpu"),
        (
            *(*TEST, "tests/gpu/test_conformance.py", "-k"),
            "not tensors_over_it and not cuda_graph and not driver_knows",
        ),
        "test_kernels.py, test_rules.py, test_tensors_over_it and "
        "test_a_cuda_graph_survives_other_slabs need arithmetic and CuPy; test_processes.py needs "
        "events of another process, which the driver does not have; "
        "test_the_driver_knows_what_is_mapped maps twice, which is a fault here",
    ),
    "engines": Section(
        "engines of vLLM in one worker",
        200,
        (*TEST, "tests/gpu_engines"),
        (*TEST, "tests/gpu_engines"),
        "which tokens they are needs arithmetic",
    ),
    "driver": Section("the pretend driver's own rules; not on a GPU", 60, (*TEST, "tests/pretend")),
    "daemon": Section(
        "the daemon's answers and changes while it runs",
        300,
        (*TEST, "tests/gpu_daemon"),
        (*TEST, "tests/gpu_daemon"),
        "which tokens they are needs arithmetic",
    ),
    "ranks": Section(
        "an instance of two ranks, and a daemon with eight, on the pretend driver; not on a GPU",
        900,
        (*TEST, "tests/gpu_ranks"),
    ),
    "probes": Section(
        "what the driver does where its documentation is silent",
        150,
        ("benchmarks/gpu_probes.py", "--json", "{json}"),
        ("benchmarks/gpu_probes.py", "mapping_costs", "larger_slabs", "--json", "{json}"),
        "noise_offsets needs arithmetic; mapped_twice, during_capture and unmap_under_work ask "
        "what a driver does, and here it is ours; mapping_during_copies and page_locking take "
        "GiBs; computing_during_mapping unregisters memory under kernels, which is a fault here",
    ),
    "switch": Section(
        "ceilings, switches of 1B and 8B, KV of four shapes, overlap",
        180,
        ("benchmarks/gpu_switch.py", "--models", "1B", "8B", "--rounds", "5", "--json", "{json}"),
        ("benchmarks/gpu_switch.py", "--smoke", "--json", "{json}"),
        "models of these sizes; packing KV by a kernel needs arithmetic",
    ),
    "switch-14b": Section(
        "the same of 14B",
        300,
        ("benchmarks/gpu_switch.py", "--models", "14B", "--rounds", "5", "--json", "{json}"),
        left_out=TOO_LARGE,
    ),
    "switch-slab16": Section(
        "8B in slabs of 16 MiB",
        180,
        (
            *("benchmarks/gpu_switch.py", "--models", "8B", "--rounds", "5", "--slab-mib", "16"),
            *("--json", "{json}"),
        ),
        left_out=TOO_LARGE,
    ),
    "codec": Section(
        "encoded weights: decoding, and a switch of 8 GB with it beside a plain one",
        150,
        ("benchmarks/codec.py", "--cuda", "--json", "{json}"),
        left_out="decoding needs arithmetic; the kernel as C++ is codec-smoke",
    ),
    "codec-smoke": Section(
        "the same as C++, tiny", 60, ("benchmarks/codec.py", "--cuda", "--smoke")
    ),
    "pool-small": Section(
        "three models in a pool for two, tokens compared with stock vLLM's",
        300,
        ("benchmarks/gpu_pool.py", "--models", "3", "--layers", "12", "--json", "{json}"),
        ("benchmarks/gpu_pool.py", "--smoke", "--json", "{json}"),
        f"models of this size; {SMALL_POOL}",
    ),
    "pool": Section(
        "eight models in a pool for two, tokens compared with stock vLLM's",
        540,
        ("benchmarks/gpu_pool.py", "--json", "{json}"),
        left_out=TOO_LARGE,
    ),
    "serve": Section(
        "the daemon: six models in a pool for two, through the API",
        420,
        ("benchmarks/gpu_serve.py", "--json", "{json}"),
        ("benchmarks/gpu_serve.py", "--smoke", "--json", "{json}"),
        "models of this size; which tokens they are needs arithmetic",
    ),
    "serve-smoke": Section(
        "the daemon with tiny models", 240, ("benchmarks/gpu_serve.py", "--smoke")
    ),
    "pool-smoke": Section(
        "engines in turns, tiny",
        240,
        ("benchmarks/gpu_pool.py", "--smoke"),
        ("benchmarks/gpu_pool.py", "--smoke"),
        SMALL_POOL,
    ),
}

CALLS: Final = {
    "A": ("memory", "switch"),
    "B": ("engines", "daemon"),
    "C": ("serve",),
    "D": ("pool-small", "codec"),
    "E": ("switch-14b", "switch-slab16"),
    "F": ("probes",),
}
"""Sections that one command of a lease has time for: what others build on comes first, and what
was measured before comes last. Together they may take longer than a lease."""
CALL_SECONDS: Final = 540.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION")
    parser.add_argument("--out", type=Path, default=Path("gpu-lease"))
    parser.add_argument("--call", choices=CALLS, help="the sections of this call")
    parser.add_argument(
        "--before",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="what an earlier call brought back: what passed there is not run again",
    )
    parser.add_argument("--limit", type=float, default=CALL_SECONDS, help="seconds of all together")
    parser.add_argument("--slow", action="store_true", help="no limit of a section but --limit")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        for name, section in SECTIONS.items():
            print(f"{name:14} {section.seconds:4.0f} s  {section.what}")
        return
    if options.call is None and not options.sections:
        show_calls()
        return
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"name sections of {', '.join(SECTIONS)}, not {', '.join(unknown)}")
    asked = [*CALLS.get(options.call, ()), *options.sections]
    passed = {name for folder in options.before for name in passed_in(folder)}
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.limit
    summary: dict[str, Any] = {}
    for name in asked:
        if name in passed:
            print(f"{name}: passed in an earlier call", flush=True)
            continue
        summary[name] = run(name, options.out, deadline, slow=options.slow)
        (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        print(f"{name}: {json.dumps(summary[name])}", flush=True)
    sys.exit(0 if all(one["status"] == 0 for one in summary.values()) else 1)


def show_calls() -> None:
    """The commands of a lease, each with the most that it takes."""
    for call, names in CALLS.items():
        seconds = sum(SECTIONS[name].seconds for name in names)
        print(f"# {call}: {', '.join(names)}; at most {seconds:.0f} s")
        print(f'python3 benchmarks/gpu_lease.py --out "$OUT" --call {call}')


def passed_in(folder: Path) -> list[str]:
    """The sections that passed in an earlier call, as its summary has them: none if it was lost
    before it had one."""
    file = folder / "summary.json"
    summary: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return [name for name, ended in summary.items() if ended["status"] == 0]


def run(name: str, out: Path, deadline: float, *, slow: bool = False) -> dict[str, Any]:
    """Run a section, and say how it ended. A slow machine has all the time that is left."""
    section = SECTIONS[name]
    if PRETENDS and section.left_out and section.pretend is None:
        return {"status": None, "why": f"not run on the pretend driver: {section.left_out}"}
    left = deadline - time.monotonic()
    if left < LEAST_SECONDS:
        return {"status": None, "why": f"{left:.0f} s are left: name it in another call"}
    limit = left if slow else min(section.seconds, left)
    parts = section.pretend if PRETENDS and section.pretend else section.command
    command = [part.format(json=out.resolve() / f"{name}.json") for part in parts]
    began = time.monotonic()
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit)
            why = ""
        except subprocess.TimeoutExpired:
            status, why = None, f"ran longer than {limit:.0f} s"
        finally:
            # It, and what it started.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    seconds = round(time.monotonic() - began, 1)
    left_out = {"left_out": section.left_out} if PRETENDS and section.left_out else {}
    return {"status": status, "seconds": seconds, **({"why": why} if why else {}), **left_out}


if __name__ == "__main__":
    main()
