"""The alert rules for Prometheus, and the scrape job they are for, fit what the daemon exports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from appliance.observability.key_metrics import WAITING, KeyMetrics
from appliance.observability.metrics import INSTANCE_STATES, Metrics
from appliance.vocabulary import FinishReason, RequestClass
from tests.docblocks import code_blocks
from tests.prose import ROOT

yaml = pytest.importorskip("yaml")  # vLLM brings it

RULES = ROOT / "packaging" / "prometheus" / "alerts.yaml"
PAGE = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
SCRAPED = {"job", "box"}
"""Labels that the scrape job gives to every sample."""
FUNCTIONS = {"sum", "rate", "increase", "delta", "deriv"}
CLAUSES = {"by", "on", "ignoring"}
WORDS = {"and", "or", "unless"}
VALUES = {
    "class": {one.value for one in RequestClass},
    "outcome": {"met", "missed", "model_failed", "no_instance", "overloaded", *FinishReason},
    "state": set(INSTANCE_STATES),
    "use": {"free", "kv"},
    "kind": {"uncorrected"},
    "limit": {WAITING},
    "job": {"appliance"},
}
"""What the code writes into labels that rules select by."""
TOKEN = re.compile(
    r"""
    (?P<space>\s+) |
    (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*) |
    (?P<selector>\{[^{}]*\}) |
    (?P<range>\[\d+[smhd]\]) |
    (?P<number>\d+(\.\d+)?) |
    (?P<sign>==|!=|<=|>=|[-+*/<>(),])
    """,
    re.VERBOSE,
)
MATCHER = re.compile(r'([a-z_]+)(=~|!~|!=|=)"([^"]*)"')


class Token(NamedTuple):
    kind: str
    text: str


def exported() -> dict[str, set[str]]:
    """Names of samples, each with its labels."""
    metrics = Metrics()
    metrics.prefetch("used")
    found: dict[str, set[str]] = {"up": set()}
    for family in [*metrics.families, *KeyMetrics().registry.families]:
        names = [family.name]
        if family.kind == "histogram":
            names = [f"{family.name}_{part}" for part in ("sum", "count")]
        found |= {name: set(family.labels) for name in names}
    return found


def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def tokens(expression: str) -> Iterator[Token]:
    """Raises `ValueError` for what is no token, and for brackets that do not match."""
    at = depth = 0
    while at < len(expression):
        found = TOKEN.match(expression, at)
        if found is None or found.lastgroup is None:
            raise ValueError(f"at {expression[at:]!r}")
        at = found.end()
        depth += {"(": 1, ")": -1}.get(found.group(), 0)
        if depth < 0:
            raise ValueError("a bracket is closed that was not opened")
        if found.lastgroup != "space":
            yield Token(found.lastgroup, found.group())
    if depth:
        raise ValueError("a bracket is not closed")


def problems(expression: str) -> list[str]:
    """What is wrong with an expression, as far as names, labels and values tell."""
    known, wrong = exported(), []
    read = [*tokens(expression), Token("end", "")]
    named = [token.text for token in read if token.text in known]
    labels = SCRAPED.union(*(known[name] for name in named))
    previous, grouping = "", False
    for token, following in pairwise(read):
        if token.text == ")":
            grouping = False
        elif token.kind == "name" and grouping:
            wrong += [f"label {token.text}"] if token.text not in labels else []
        elif token.text in CLAUSES:
            grouping = following.text == "("
            wrong += [] if grouping else [f"{token.text} without labels"]
        elif token.kind == "name" and following.text in ("(", *CLAUSES):
            if token.text not in FUNCTIONS | WORDS:
                wrong.append(f"function {token.text}")
        elif token.kind == "name" and token.text not in known.keys() | WORDS:
            wrong.append(f"metric {token.text}")
        elif token.kind == "selector":
            wrong += bad_matchers(token.text, SCRAPED | known.get(previous, set()))
        previous = token.text
    return wrong if named else [*wrong, "no metric"]


def bad_matchers(selector: str, labels: set[str]) -> Iterator[str]:
    rest = MATCHER.sub("", selector).strip("{}, ")
    if rest:
        yield f"selector {rest}"
    for label, sign, value in MATCHER.findall(selector):
        if label not in labels:
            yield f"label {label}"
            continue
        for one in value.split("|") if "~" in sign else [value]:
            if one not in VALUES[label]:
                yield f"{label}={one}"


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_a_rule_asks_for_what_is_exported(rule: dict[str, Any]) -> None:
    """Its metrics, labels and values exist, and its summary uses labels that its samples have."""
    assert problems(rule["expr"]) == []
    known = exported()
    grouped = re.findall(r"\bsum by \(([^)]*)\)", rule["expr"])
    has = set(grouped[0].split(", ")) if grouped else SCRAPED.copy()
    if not grouped or "unless" in rule["expr"]:
        has |= known[next(token.text for token in tokens(rule["expr"]) if token.text in known)]
        has |= {label for name in known if name in rule["expr"] for label in known[name]}
    used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert "box" in used
    assert used <= has


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("appliance_gone > 0", ["metric appliance_gone", "no metric"]),
        ('appliance_instances{state="down"} > 0', ["state=down"]),
        ('appliance_instances{model="m"} > 0', ["label model"]),
        ("sum by (nothing) (rate(appliance_requests_total[5m]))", ["label nothing"]),
        ("avg_over_years(appliance_progress_age_seconds[5m])", ["function avg_over_years"]),
        ("sum by (rate(appliance_requests_total[5m]))", ["label rate"]),
    ],
)
def test_a_wrong_rule_is_found(expression: str, wrong: list[str]) -> None:
    assert problems(expression)[: len(wrong)] == wrong


@pytest.mark.parametrize("expression", ["sum(up", "up) > 0", "up{job=", "up = 1"])
def test_what_is_no_expression_is_found(expression: str) -> None:
    with pytest.raises(ValueError, match=r"bracket|at "):
        list(tokens(expression))


def test_alerts_have_a_severity_and_a_remedy() -> None:
    """Each once, and each in the table of docs/monitoring.md."""
    names = [rule["alert"] for rule in alerts()]

    assert len(names) == len(set(names)) > 10
    assert {rule["labels"]["severity"] for rule in alerts()} == {"critical", "warning", "info"}
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)[: len(names)] == names


def test_the_scrape_job_is_the_one_of_the_rules() -> None:
    """It keeps the daemon's label `instance`, and names each box."""
    (block,) = code_blocks("docs/monitoring.md", "yaml", containing="scrape_configs:")
    (job,) = yaml.safe_load(block.text)["scrape_configs"]

    assert job["job_name"] in VALUES["job"]
    assert job["honor_labels"] is True
    assert all("box" in target["labels"] for target in job["static_configs"])
    assert job["metrics_path"] == "/metrics"
    assert job["authorization"]["type"] == "Bearer"


def test_every_metric_of_the_page_exists() -> None:
    known = exported()
    for name in re.findall(r"`((?:appliance_|vllm:)\w+)`", PAGE):
        assert name in known or f"{name}_sum" in known, name
