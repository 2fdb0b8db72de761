"""llm-d's endpoint picker reads our metrics: its rules, told anew, over what a daemon exports.

The rules are those of llm-d/llm-d-router at ebab687927f5331c1b39defcb579a07951bce56c, in
pkg/epp/framework/plugins/datalayer/extractor/metrics (spec.go, loraspec.go, extractor.go) and
pkg/epp/framework/plugins/scheduling/scorer/loraaffinity.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.unit.doubles.daemon import Box, setup_of, small

yaml: Any = importlib.import_module("yaml")  # it has no types
ROOT = Path(__file__).parents[3]
PICKER = yaml.safe_load((ROOT / "packaging" / "llm-d" / "epp.yaml").read_text(encoding="utf-8"))


def engine() -> dict[str, str]:
    """Our entry of `engineConfigs`."""
    plugins = {plugin["type"]: plugin for plugin in PICKER["plugins"]}
    (found,) = plugins["core-metrics-extractor"]["parameters"]["engineConfigs"]
    return dict(found)


def families(exposition: bytes) -> dict[str, list[Sample]]:
    """Samples by the name that they have in the text."""
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def first_sample(found: dict[str, list[Sample]], spec: str) -> Sample:
    """A sample replaces the one before only with a later timestamp; those without have 0."""
    assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", spec), "a specification without labels"
    latest: Sample | None = None
    recent = -1.0
    for sample in found[spec]:
        at = float(sample.timestamp or 0)
        if at > recent:
            latest, recent = sample, at
    assert latest is not None
    return latest


def adapters(found: dict[str, list[Sample]], spec: str) -> tuple[set[str], set[str], int]:
    """Running and waiting ones and their most, of the sample with the highest value."""
    labels = max(found[spec], key=lambda sample: sample.value).labels
    running, waiting = (
        {name.strip() for name in labels[label].split(",") if name.strip()}
        for label in ("running_lora_adapters", "waiting_lora_adapters")
    )
    return running, waiting, int(labels["max_lora"])


def affinity(read: tuple[set[str], set[str], int], model: str) -> float:
    """What its affinity scorer gives a box for a request."""
    active, waiting, most = read
    if model in active:
        return 1.0
    if len(active) + len(waiting) < most:
        return 0.8
    return 0.6 if model in waiting else 0.0


async def test_a_picker_reads_load_and_residency(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample each, of all models together; the resident model scores best, one that is not
    resident worst, and the update time is the sample's value."""
    models = small("ab")
    box = Box(monkeypatch, models, setup_of(models))
    box.start()
    box.ask("r", "a", output=50)
    box.work_until(lambda: box.world.lives["r"].produced == 3)
    mine, found = engine(), families(box.daemon.metrics())
    box.world.lives["r"].outcome = "cancelled"
    load = box.daemon.load()
    box.daemon.host.close()

    for field in ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec", "loraSpec"):
        assert len(found[mine[field]]) == 1, field
    assert first_sample(found, mine["queuedRequestsSpec"]).value == load.waiting
    assert first_sample(found, mine["runningRequestsSpec"]).value == load.running
    assert load.waiting + load.running == 1
    assert 0 <= first_sample(found, mine["kvUsageSpec"]).value <= 1
    read = adapters(found, mine["loraSpec"])
    assert read[0] == set(load.resident) >= {"a"}
    assert affinity(read, "a") == 1.0
    assert affinity(read, "of another box") == 0.0
    assert found[mine["loraSpec"]][0].value > 1e9


async def test_what_was_resident_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scrape has one sample of the models' places, also after they changed."""
    models = small("ab")
    box = Box(monkeypatch, models, setup_of(models))
    box.start()
    before = box.daemon.load()
    box.daemon.metrics()
    box.ask("r", "a", output=50)
    box.work_until(lambda: box.world.lives["r"].produced == 3)
    found = families(box.daemon.metrics())
    after = box.daemon.load()
    box.world.lives["r"].outcome = "cancelled"
    box.daemon.host.close()

    assert len(found["appliance_models_info"]) == 1
    assert before.catalogue == after.catalogue == ("a", "b")
    assert (before.version == after.version) == (before.resident == after.resident)
