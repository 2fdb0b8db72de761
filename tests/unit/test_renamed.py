"""Metrics, API fields and codes that were renamed have their old names nowhere."""

from __future__ import annotations

import re

import pytest

from tests.prose import ROOT

RENAMED = {
    "appliance_key_refusals": "appliance_key_rejections",
    "appliance_recoveries": "appliance_requests_recovered",
    "appliance_request_load_seconds": "appliance_request_model_load_seconds",
    "computing_seconds": "busy_seconds",
    r'"lately"': '"window"',
    r'code[":= ]+reader"|`reader`': "slow_client",
    r'outcome=\\*"(kept|late)\\*"': 'outcome="met" or "missed"',
    "FloorView": "ClusterView",
    r"scheduling\.questions": "scheduling.policy_api",
    r"`enough`|\benough *= *[0-9]": "slack_target",
    "appliance.*patience_seconds": "max_lateness_seconds",
    r"model_(leaving|wanted|dismissed)": "model_removing, …_load_requested, …_evict_requested",
    r"Model(Wanted|Dismissed)|Reader(Stalled|WentOn)": "ModelLoadRequested, ClientResumed, …",
    r'PAUSED = "held"|phase[`": =]+held\b': "paused",
    r'state[`": ]+"?stored\b': "cold",
    r"\broster\b": "membership_version",
    r"phase[`\": =]+ready\b": "preempted",
    r"appliance[./]conformance": "appliance.testing",
}
"""What it was, as a pattern, and what it is."""
PLACES = ("appliance", "tui", "docs", "packaging", "etc", "benchmarks", "README.md")
KINDS = {".py", ".md", ".json", ".toml", ".html"}
HISTORY = ("benchmarks/results/", "docs/decisions/")


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    found = {}
    for place in (ROOT / place for place in PLACES):
        for file in [place] if place.is_file() else place.rglob("*"):
            name = str(file.relative_to(ROOT))
            if file.suffix in KINDS and not name.startswith(HISTORY):
                found[name] = file.read_text(encoding="utf-8")
    return found


@pytest.mark.parametrize("old", RENAMED)
def test_no_old_name_is_left(old: str, texts: dict[str, str]) -> None:
    assert [name for name, text in texts.items() if re.search(old, text)] == []


def test_the_changelog_tells_every_new_name() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for name in ("appliance_key_rejections", "appliance_requests_recovered", "busy_seconds"):
        assert name in changelog
    for name in ("appliance_request_model_load_seconds", "slow_client", "`window`", "ClusterView"):
        assert name in changelog
    for name in (
        "`slack_target`",
        "`max_lateness_seconds`",
        "`membership_version`",
        "`paused`",
        "`preempted`",
    ):
        assert name in changelog
    for name in ("`cold`", "`removing`", "`model_load_requested`", "`model_evict_requested`"):
        assert name in changelog
