"""What the appliance is made of: pins of requirements/, their digests, the bill of materials."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType
from urllib.parse import quote

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
REQUIREMENTS = ROOT / "requirements"
LISTS = sorted(path.name for path in REQUIREMENTS.glob("*.txt"))
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the modules lie that make packages, for an import."""
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    return ROOT / "packaging"


@pytest.fixture
def pins(tools: Path) -> ModuleType:
    return importlib.import_module("pins")


@pytest.fixture
def sbom(tools: Path) -> ModuleType:
    return importlib.import_module("sbom")


@pytest.mark.parametrize("name", LISTS)
def test_every_pin_has_digests(pins: ModuleType, name: str) -> None:
    """One version of each package, with at least one SHA-256, none twice."""
    found = pins.read(REQUIREMENTS / name)

    assert len(found) > 0
    for pin in found:
        assert re.fullmatch(r"[\w.-]+", pin.name), pin
        assert re.fullmatch(r"[\w.+]+", pin.version), pin
        assert pin.hashes, pin
        assert all(map(DIGEST.fullmatch, pin.hashes)), pin
        assert len(set(pin.hashes)) == len(pin.hashes), pin
    names = [canonicalize_name(pin.name) for pin in found]
    assert len(set(names)) == len(names)


def test_no_two_lists_pin_different_versions(pins: ModuleType) -> None:
    """What one list installs is not replaced by the next; clients have their own environments."""
    versions: dict[str, str] = {}
    for name in ("cpu", "dev", "images", "torch-cuda"):
        for pin in pins.read(REQUIREMENTS / f"{name}.txt"):
            key = canonicalize_name(pin.name)
            assert versions.setdefault(key, pin.version) == pin.version, (name, pin)


@pytest.mark.parametrize(
    ("names", "extras"),
    [
        (("cpu", "torch-cpu"), ("cpu", "tui", "web")),
        (("cpu", "torch-cuda"), ("cpu", "tui", "web")),
        (("gpu",), ("gpu", "tui", "web")),
        (("gpu-cuda12",), ("gpu-cuda12",)),
    ],
)
def test_an_engine_has_what_its_extras_ask_for(
    pins: ModuleType, names: tuple[str, ...], extras: tuple[str, ...]
) -> None:
    """The package has no Textual: what `appliance-engine` installs has it, and the engine."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = {
        canonicalize_name(pin.name): pin.version
        for name in names
        for pin in pins.read(REQUIREMENTS / f"{name}.txt")
    }

    for line in [line for extra in extras for line in asked[extra]]:
        requirement = Requirement(line)
        version = found[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), line


def test_digests_are_written_below_their_pins(pins: ModuleType, tmp_path: Path) -> None:
    """The comment at the top stays, digests of before do not."""
    uv = tmp_path / "uv"
    uv.write_text(
        "#!/bin/sh\nread asked\nprintf '%s \\\\\n    --hash=sha256:aa\n' \"$asked\"\n"
        "read asked\nprintf '%s \\\\\n    --hash=sha256:bb\n' \"$asked\"\n"
    )
    uv.chmod(0o755)
    listed = tmp_path / "cpu.txt"
    listed.write_text(
        "# A list.\n# Of two.\nsix==1 ; python_full_version >= '3.12' --hash=sha256:00\n"
        "torch==2.13.0\n"
    )

    pins.write(listed, uv)

    assert listed.read_text() == (
        "# A list.\n# Of two.\n"
        "six==1 ; python_full_version >= '3.12' \\\n    --hash=sha256:aa\n"
        "torch==2.13.0 \\\n    --hash=sha256:bb\n"
    )


def test_the_bill_lists_every_pin(pins: ModuleType, sbom: ModuleType) -> None:
    """Of all lists that the package installs from: with version, digests, and who installs it."""
    document = sbom.bill("1.2", [])

    there = {one["purl"]: one for one in document["components"]}
    for file, name in sbom.LISTS.items():
        for pin in pins.read(REQUIREMENTS / file):
            one = there[f"pkg:pypi/{canonicalize_name(pin.name)}@{quote(pin.version)}"]
            assert one["version"] == pin.version
            assert {"name": "appliance:installed-by", "value": name} in one["properties"]
            digests = {digest["content"] for digest in one["hashes"]}
            assert {hash.removeprefix("sha256:") for hash in pin.hashes} <= digests
    engines = {path.name for path in REQUIREMENTS.glob("*.txt")} - {
        *("aider.txt", "clients.txt", "dev.txt", "openwebui.txt"),  # tests
        *("docs.txt", "pins.txt"),  # tools
        "gpu-dry.txt",  # tests
        "fleet.txt",  # tests, and an environment of its own for a fleet
        "gpu-cuda12.txt",  # added by hand to an engine that the package does not install
    }
    assert set(sbom.LISTS) == engines


def test_the_bill_lists_what_is_packaged(sbom: ModuleType) -> None:
    """The appliance's own dependencies, those of them that no list pins, too."""
    packaged = list(sbom.needed("appliance", "pip"))
    document = sbom.bill("1.2", packaged)

    there = {(one["name"], one["version"]): one for one in document["components"]}
    assert {"pip", "litestar", "msgspec", "uvicorn"} <= {name for name, _ in there}
    for one in packaged:
        properties = there[canonicalize_name(one.name), one.version]["properties"]
        assert {"name": "appliance:installed-by", "value": "package"} in properties
    assert there["litestar", importlib.metadata.version("litestar")]["licenses"] == [
        {"license": {"name": "MIT"}}
    ]


def test_the_bill_is_cyclonedx(sbom: ModuleType) -> None:
    """What its schema requires, no other words, references that are unique, and the same bytes
    each time."""
    packaged = list(sbom.needed("appliance", "pip"))
    document = sbom.bill("1.2", packaged)

    assert set(document) == {
        *("bomFormat", "specVersion", "serialNumber", "version", "metadata", "components")
    }
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["version"] == 1
    assert re.fullmatch(
        r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
        document["serialNumber"],
    )
    root = document["metadata"]["component"]
    assert (root["type"], root["name"], root["version"]) == ("application", "appliance", "1.2")
    components = [root, *document["components"]]
    for one in components:
        assert {"type", "name", "version"} <= set(one)
        assert set(one) <= {
            *("type", "bom-ref", "name", "version", "purl", "properties", "hashes", "licenses")
        }
        assert one["type"] in ("application", "library")
        for digest in one.get("hashes", []):
            assert set(digest) == {"alg", "content"}
            assert digest["alg"] == "SHA-256"
            assert re.fullmatch("[0-9a-f]{64}", digest["content"])
        for licence in one.get("licenses", []):
            assert set(licence) in ({"expression"}, {"license"})
    references = [one["bom-ref"] for one in components]
    assert len(set(references)) == len(references)
    assert json.dumps(sbom.bill("1.2", packaged)) == json.dumps(document)
