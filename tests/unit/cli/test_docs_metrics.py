"""What is said about the metrics: the document, the dashboard, and vLLM's own names."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from appliance.cli.docs.metrics import generate
from appliance.observability.metrics import Metrics
from appliance.observability.request_metrics import LATENCY_BUCKETS
from tests.docblocks import code_blocks

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "packaging" / "grafana" / "appliance.json"
NAME = re.compile(r"\b(?:vllm:|appliance_)[a-z0-9_]+")


def exposed() -> dict[str, tuple[str, ...]]:
    """Names of samples, each with the labels it has."""
    metrics = Metrics()
    metrics.prefetch("used")
    found = {}
    for family in metrics.families:
        found[family.name] = family.labels
        if family.kind == "histogram":
            del found[family.name]
            found |= {f"{family.name}_{part}": family.labels for part in ("sum", "count")}
            found[f"{family.name}_bucket"] = (*family.labels, "le")
    return found


def vllm_source(name: str) -> str:
    """A file of the installed vLLM, unread by Python: importing it loads torch."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    return (Path(spec.origin).parent / "v1" / "metrics" / name).read_text()


def test_the_document_is_up_to_date() -> None:
    """`docs/metrics.md` is what `make generate` writes."""
    assert (ROOT / "docs" / "metrics.md").read_text() == generate()


def test_the_families_are_what_a_scraper_reads() -> None:
    """Every family that is documented is exposed under that name, and no other is."""
    text = Metrics().exposition().decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))

    created = {f.name: f.kind for f in Metrics().families}

    assert created == {name: kind for name, kind in kinds.items() if "_created" not in name}


def test_every_metric_of_the_dashboard_exists() -> None:
    """Its queries name samples that are exposed, and labels that these have."""
    board = json.loads(DASHBOARD.read_text())
    queries = [t["expr"] for p in board["panels"] for t in p.get("targets", ())]
    assert len(queries) > 30
    queries += [v["query"]["query"] for v in board["templating"]["list"] if v["name"] == "model"]
    for query in queries:
        check_query(query)


def test_the_query_of_the_document_is_right() -> None:
    (block,) = code_blocks("docs/metrics.md", "promql")

    check_query(block.text)


def check_query(query: str) -> None:
    """Its names and labels are exposed."""
    known = exposed()
    names = NAME.findall(query)
    assert names, query
    assert set(names) <= known.keys(), query
    labels = {label for name in names for label in known[name]}
    used = re.findall(r"([a-z_]+)=~?\"", query)
    for group in re.findall(r"by \(([^)]*)\)", query):
        used += group.split(", ")
    assert set(used) <= labels, query


def test_the_dashboard_shows_everything_of_ours() -> None:
    """A metric that no panel shows is named here, with a reason."""
    elsewhere = {
        "appliance_instance_quarantined",  # for alerts: the panel of instances counts them
        "appliance_kv_disk_errors_total",  # for alerts: 0 unless the disk fails
        "appliance_kv_recomputed_tokens_total",  # for alerts: 0 unless the host cache is too small
        "appliance_kv_fragmentation",  # by shape: the panel has the whole
        "appliance_kv_usage_ratio",  # for routers of several boxes, as are the next three
        "appliance_models_info",
        "appliance_requests_running",
        "appliance_requests_waiting",
        "appliance_prefills_total",  # equals the requests unless a worker is lost
        "appliance_prefetches_total",  # the panel has the ratio
    }
    shown = set(NAME.findall(DASHBOARD.read_text()))
    metrics = Metrics()
    metrics.prefetch("used")
    ours = {family.name for family in metrics.families if family.name.startswith("appliance_")}
    parts = ("", "_sum", "_count", "_bucket")

    assert {name for name in ours if not shown & {name + part for part in parts}} == elsewhere


def test_names_of_vllm_are_vllms() -> None:
    """Each is in the installed version; its counters gain their suffix when they are exposed."""
    source = vllm_source("loggers.py") + vllm_source("../spec_decode/metrics.py")
    names = [f.name for f in Metrics().families if f.name.startswith("vllm:")]

    assert len(names) > 15
    for name in names:
        assert f'"{name.removesuffix("_total")}"' in source


def test_buckets_are_vllms() -> None:
    """Quantiles over both servers are comparable."""
    source = vllm_source("buckets.py")
    numbers = re.search(r"REQUEST_LATENCY_BUCKETS[^(]*\(([^)]*)\)", source)
    assert numbers is not None

    theirs = [
        float(number) for number in numbers[1].replace("\n", " ").split(",") if number.strip()
    ]

    assert theirs == list(LATENCY_BUCKETS)
