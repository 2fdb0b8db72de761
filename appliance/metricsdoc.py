"""The documentation of the metrics, from the metrics: ``python -m appliance.metricsdoc``."""

from __future__ import annotations

import sys

from appliance.api.keymetrics import KeyMetrics
from appliance.api.metrics import Metrics

HEAD = """\
# Metrics

Generated from the metrics (`appliance/api/metrics.py`) by `python -m appliance.metricsdoc`.
`GET /metrics` answers in Prometheus' text format. What vLLM counts has vLLM's name and meaning
(label `model_name`), so that its dashboards work here; `packaging/grafana/appliance.json` is a
dashboard for the rest. Times are seconds, sizes bytes.

Shares are for the scraper to compute. Of the tokens of the last five minutes that came in time:

```
sum by (model) (rate(appliance_slo_tokens_total{outcome="kept"}[5m]))
  / sum by (model) (rate(appliance_slo_tokens_total[5m]))
```

A switch has its reason in `appliance_switches_total` (a `prefill` or a `turn` of another model) and
its phases in `appliance_transfer_seconds`: `weights`, `kv_out`, `kv_in`. vLLM's histograms of what
only a step of an engine knows (`vllm:iteration_tokens_total`, the prefix cache's queries and hits)
are not there.
"""


def generate() -> str:
    """The text of ``docs/metrics.md``."""
    metrics = Metrics()
    metrics.prefetch("used")  # its ratio is not there before
    families = sorted([*metrics.families, *KeyMetrics().registry.families])
    lines = [HEAD]
    for title, prefix in (("vLLM's", "vllm:"), ("The appliance's own", "appliance_")):
        lines += [f"## {title}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
        for family in families:
            if family.name.startswith(prefix):
                labels = ", ".join(f"`{label}`" for label in family.labels)
                lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.about} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(generate())
