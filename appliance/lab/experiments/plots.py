"""Plots of a contest, as PNG files. Needs matplotlib (the extra ``lab``), loaded only here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from appliance.errors import LabError
from appliance.lab.experiments.metrics import QUANTILES, Curves
from appliance.lab.experiments.report import ComparisonReport


def check() -> None:
    """Raises `LabError` without matplotlib: better before a contest than after it."""
    _pyplot()


def draw(report: ComparisonReport, directory: Path) -> list[Path]:
    """Latency distributions, attainment and GPUs over time of all policies, and of each a Gantt
    chart and its memory: of its first seed. Raises what `check` raises."""
    plt = _pyplot()
    directory.mkdir(parents=True, exist_ok=True)
    first = {outcome.policy: outcome.curves for outcome in reversed(report.outcomes)}
    known = {policy: found for policy in report.policies() if (found := first[policy]) is not None}
    made = [
        _distribution(plt, known, "ttft_quantiles", "time to first token (s)", directory),
        _distribution(plt, known, "tbt_quantiles", "time between tokens (s)", directory),
        _over_time(plt, known, directory),
        _gpus(plt, known, directory),
    ]
    for number, (policy, found) in enumerate(known.items()):
        made.append(_gantt(plt, policy, found, directory / f"turns-{number}.png"))
        made.append(_memory(plt, policy, found, directory / f"memory-{number}.png"))
    return made


def draw_sweep(
    points: Mapping[str, Mapping[float, float]], load: str, targets: Sequence[float], path: Path
) -> None:
    """Attainment over load, a line for each policy. Raises what `check` raises."""
    plt = _pyplot()
    figure, axes = plt.subplots()
    for policy, attained in points.items():
        loads = sorted(attained)
        axes.plot(loads, [attained[load] for load in loads], marker="o", label=policy)
    for target in targets:
        axes.axhline(target, color="grey", linewidth=0.5)
    axes.set_xlabel(load)
    axes.set_ylabel("attainment")
    axes.legend()
    _save(plt, figure, path)


def _distribution(
    plt: Any, known: Mapping[str, Curves], name: str, label: str, directory: Path
) -> Path:
    figure, axes = plt.subplots()
    for policy, found in known.items():
        quantiles = getattr(found, name)
        axes.plot(quantiles, QUANTILES[: len(quantiles)], label=policy)
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("share")
    axes.legend()
    return _save(plt, figure, directory / f"{name.removesuffix('_quantiles')}.png")


def _over_time(plt: Any, known: Mapping[str, Curves], directory: Path) -> Path:
    figure, axes = plt.subplots()
    for policy, found in known.items():
        times = [(n + 0.5) * found.window_seconds for n in range(len(found.attainment))]
        axes.plot(times, found.attainment, label=policy)
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens in time")
    axes.set_ylim(0, 1.02)
    axes.legend()
    return _save(plt, figure, directory / "attainment.png")


def _gpus(plt: Any, known: Mapping[str, Curves], directory: Path) -> Path:
    figure, axes = plt.subplots()
    for policy, found in known.items():
        [line] = axes.step(found.looks, found.gpus_with_work, where="pre", label=policy)
        colour = line.get_color()
        axes.step(found.looks, found.gpus_opened, where="pre", linestyle=":", color=colour)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GPUs with work, and not parked (dotted)")
    axes.set_ylim(bottom=0)
    axes.legend()
    return _save(plt, figure, directory / "gpus.png")


def _memory(plt: Any, policy: str, found: Curves, path: Path) -> Path:
    """Two maps, time from left to right and an instance to a row."""
    figure, both = plt.subplots(2, 1, sharex=True, figsize=(12, 6))
    held = {"weights": found.weights_share, "KV": found.kv_share}
    for axes, (what, shares) in zip(both, held.items(), strict=True):
        rows = list(zip(*shares, strict=True)) or [(0.0,)]  # a recording has none
        place = (0, max(found.looks, default=1.0), len(rows) - 0.5, -0.5)
        shown = axes.imshow(rows, aspect="auto", vmin=0, extent=place, interpolation="nearest")
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("instance")
        axes.set_title(f"{policy}: {what}")
        figure.colorbar(shown, ax=axes, label="share of the pool")
    both[-1].set_xlabel("seconds")
    return _save(plt, figure, path)


def _gantt(plt: Any, policy: str, found: Curves, path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(12, 5))
    models = sorted({bar.model for bar in found.bars})
    colours = plt.get_cmap("hsv")
    for bar in found.bars:
        axes.barh(
            bar.instance,
            bar.ended - bar.began,
            left=bar.began,
            height=0.8 if bar.turn else 0.4,
            color=colours(models.index(bar.model) / len(models)),
        )
    axes.set_yticks(sorted({bar.instance for bar in found.bars}))
    axes.set_title(f"{policy}: turns, and prompts (narrow), by model")
    axes.set_xlabel("seconds")
    axes.set_ylabel("instance")
    return _save(plt, figure, path)


def _save(plt: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    return path


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError:
        raise LabError("plots need matplotlib: pip install 'appliance[lab]'") from None
    mpl.use("agg")
    from matplotlib import pyplot

    return pyplot
