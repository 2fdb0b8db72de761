"""What policies lose against the best that is possible, on boxes that are small enough to search.

    python -m benchmarks.optimum --cases 1000 --seed 1 --json FILE [--minutes 4]

Random tiny boxes (`benchmarks.tiny_boxes`). For each, the most tokens in time that any policy could
reach (`benchmarks.optimum_search`), and what each policy reaches in the lab. A policy's loss is the
difference, as a share of the tokens. The optimum knows all arrivals and all lengths; the policies
know neither. The lab's figures are the same on any machine. A FILE that is there is gone on with:
it takes several calls of a few minutes, if need be.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.optimum_search import least_lost
from benchmarks.provenance import made_on_cpu
from benchmarks.tiny_boxes import TinyBox, cases, tokens_in_time

POLICIES = ("appliance", "aegaeon", "serverlessllm", "prism")
WORST = 5

Case = dict[str, Any]

GROUPS: dict[str, Callable[[TinyBox], bool]] = {
    "all": lambda box: True,
    "one instance, room for one model": lambda box: box.instances == 1 and not box.all_fit,
    "one instance, room for both": lambda box: box.instances == 1 and box.all_fit,
    "two instances, room for one model": lambda box: box.instances == 2 and not box.all_fit,
    "two instances, room for both": lambda box: box.instances == 2 and box.all_fit,
}


def played(box: TinyBox) -> Case:
    """Tokens that are lost by the best decisions, and by each policy."""
    optimum = least_lost(box)
    lost = {policy: box.tokens - tokens_in_time(box, policy) for policy in POLICIES}
    return {
        "tokens": box.tokens,
        "optimum": optimum.lost,
        "exact": optimum.is_exact,
        "lost": lost,
    }


def summary(boxes: Sequence[TinyBox], found: Sequence[Case]) -> dict[str, Any]:
    """Of each group of boxes and each policy; losses are shares of the tokens."""
    made: dict[str, Any] = {}
    for group, belongs in GROUPS.items():
        its = [case for box, case in zip(boxes, found, strict=True) if belongs(box)]
        made[group] = {
            "cases": len(its),
            "optimum_loses": sum(case["optimum"] > 0 for case in its),
            "policies": {policy: _losses(its, policy) for policy in POLICIES} if its else {},
        }
    return made


def loss(case: Case, policy: str) -> float:
    """What the policy loses more than the best decisions, as a share of the tokens."""
    return float((case["lost"][policy] - case["optimum"]) / case["tokens"])


def _losses(found: Sequence[Case], policy: str) -> dict[str, float]:
    losses = np.array([loss(case, policy) for case in found])
    quantiles = {
        name: round(float(np.quantile(losses, share)), 4)
        for name, share in (("median", 0.5), ("p75", 0.75), ("p90", 0.9), ("p99", 0.99))
    }
    return {
        "at_optimum": round(float((losses == 0).mean()), 4),
        "mean": round(float(losses.mean()), 4),
        **quantiles,
        "worst": round(float(losses.max()), 4),
    }


def worst(found: Sequence[Case], policy: str) -> list[int]:
    """The numbers of the cases in which the policy loses most, the worst first."""
    return sorted(range(len(found)), key=lambda n: (-loss(found[n], policy), n))[:WORST]


def _read(file: Path | None, seed: int) -> list[Case]:
    if file is None or not file.exists():
        return []
    document = json.loads(file.read_text(encoding="utf-8"))
    if document["seed"] != seed:
        raise SystemExit(f"--json: {file} is of seed {document['seed']}; name another file")
    cases_there: list[Case] = document["cases"]
    return cases_there


def _write(file: Path, seed: int, boxes: Sequence[TinyBox], found: Sequence[Case]) -> None:
    document = {
        **made_on_cpu(),
        "seed": seed,
        "summary": summary(boxes, found),
        "worst": {policy: worst(found, policy) for policy in POLICIES},
    }
    head = json.dumps(document, indent=1)[:-2]
    rows = ",\n  ".join(json.dumps(case) for case in found)  # one line each
    file.write_text(f'{head},\n "cases": [\n  {rows}\n ]\n}}\n', encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    boxes = list(cases(options.cases, options.seed))
    found = _read(options.json, options.seed)[: options.cases]
    until = time.monotonic() + 60 * options.minutes
    for box in islice(boxes, len(found), None):
        if time.monotonic() > until:
            break
        found.append(played(box))
    boxes = boxes[: len(found)]
    if options.json:
        _write(options.json, options.seed, boxes, found)
    print(f"{len(found)} of {options.cases} cases")
    for group, its in summary(boxes, found).items():
        for policy, losses in its["policies"].items():
            figures = ", ".join(f"{name} {value}" for name, value in losses.items())
            print(f"{group} ({its['cases']}): {policy}: {figures}")


if __name__ == "__main__":
    main()
