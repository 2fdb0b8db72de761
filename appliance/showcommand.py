"""``appliance show``: what a model is, what it takes and promises, and where it is now."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from appliance.client import get
from appliance.modelcommands import model_command
from appliance.printing import print_json
from appliance.units import human


@model_command
def show(model: str, url: str, as_json: bool) -> None:
    """Show what MODEL is: its architecture and sizes, its terms, and where it is."""
    found = get(url, f"/api/models/{quote(model)}")
    if as_json:
        print_json(found)
        return
    lines = [*_facts(found["facts"]), *_terms(found["terms"]), *_whereabouts(found)]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        click.echo(f"{name:<{width}}  {value}")


def _facts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("architecture", facts["architecture"]),
        ("parameters", _count(facts["parameters"])),
        ("context", f"{facts['max_context_tokens']} tokens"),
        ("computed in", facts["dtype"]),
        ("weights", human(facts["weight_bytes"])),
        ("KV per token", human(facts["kv_bytes_per_token"])),
        ("batch", f"at most {facts['max_batch']} requests"),
        ("files", facts["path"]),
    ]


def _terms(terms: dict[str, Any]) -> list[tuple[str, str]]:
    promises = [
        (
            name,
            f"first token {terms[key]['ttft_seconds']:g} s, "
            f"then {terms[key]['tbt_seconds']:g} s each",
        )
        for name, key in (("interactive", "slo"), ("batch work", "batch_slo"))
    ]
    pinned = "stays in the host cache" if terms["pinned"] else "gives way in the host cache"
    return [*promises, ("queue", f"at most {terms['max_queue']} requests"), ("pin", pinned)]


def _whereabouts(found: dict[str, Any]) -> list[tuple[str, str]]:
    places = ", ".join(f"instance {n}: {at}" for n, at in sorted(found["residency"].items()))
    requests = f"{found['running']} running, {found['waiting']} waiting"
    if found["draining"]:
        requests += "; takes no new ones"
    state = ": ".join([found["state"], *(found["failure"] or "").splitlines()[:1]])
    return [("state", state), ("residency", places or "nowhere"), ("requests", requests)]


def _count(number: int) -> str:
    """Parameters as people say them: 8.0B, 135M."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return str(number)
