"""The bill of materials: what the appliance is made of, as CycloneDX 1.6 in JSON.

``python packaging/sbom.py`` prints it; the Debian package has it among its documents.

It lists what a list of requirements/ pins for people who run the appliance (its tests and their
clients are no part of it), with the digests of all files that pip may install, and whatever else is
in the Debian package. Licences are those that the installed packages name. The same sources and
packages make the same bytes.
"""

from __future__ import annotations

import importlib.metadata as metadata
import json
import sys
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Final
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pins import REQUIREMENTS, Pin, read

LISTS: Final = {
    "cpu.txt": "engine-cpu",
    "gpu.txt": "engine-gpu",
    "images.txt": "images-cpu",
    "torch-cpu.txt": "torch-cpu",
    "torch-cuda.txt": "torch-cuda",
}
"""Of requirements/, and what the package calls each."""
OURS: Final = "appliance"


def bill(version: str, packaged: Iterable[metadata.Distribution]) -> dict[str, Any]:
    """The document for the appliance of `version`, whose package has the distributions
    `packaged`."""
    listed: dict[tuple[str, str], list[str]] = {}
    hashes: dict[tuple[str, str], tuple[str, ...]] = {}
    for file, name in LISTS.items():
        for pin in read(REQUIREMENTS / file):
            listed.setdefault(_key(pin), []).append(name)
            hashes[_key(pin)] = tuple(dict.fromkeys((*hashes.get(_key(pin), ()), *pin.hashes)))
    for one in packaged:
        listed.setdefault((canonicalize_name(one.name), one.version), []).append("package")
    components = [
        _component(name, version, listed[name, version], hashes.get((name, version), ()))
        for name, version in sorted(listed)
    ]
    # It has no address of a package index, where the name may be another's.
    root = {"type": "application", "bom-ref": OURS, "name": OURS, "version": version}
    content = json.dumps([root, components])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_OID, content).urn,
        "version": 1,
        "metadata": {"component": root | {"licenses": [_licence(OURS)]}},
        "components": components,
    }


def needed(*roots: str) -> Iterator[metadata.Distribution]:
    """The installed distributions that these need, the appliance itself left out."""
    waiting, seen = [canonicalize_name(root) for root in roots], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name != "appliance":
            yield metadata.distribution(name)
        waiting += [
            canonicalize_name(requirement.name)
            for requirement in _requirements(name)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ]


def _requirements(name: str) -> list[Requirement]:
    return [Requirement(line) for line in metadata.requires(name) or ()]


def _key(pin: Pin) -> tuple[str, str]:
    return canonicalize_name(pin.name), pin.version


def _component(
    name: str, version: str, lists: Iterable[str], hashes: Iterable[str]
) -> dict[str, Any]:
    """A package; `lists` says what installs it."""
    purl = f"pkg:pypi/{name}@{quote(version)}"
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "properties": [{"name": "appliance:installed-by", "value": one} for one in lists],
    }
    if digests := [one.partition(":")[2] for one in hashes]:
        component["hashes"] = [{"alg": "SHA-256", "content": digest} for digest in digests]
    if licence := _licence(name):
        component["licenses"] = [licence]
    return component


def _licence(name: str) -> dict[str, Any] | None:
    """The one that the installed package names, if it is installed and names one."""
    try:
        told = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    if expression := told.get("License-Expression"):
        return {"expression": expression}
    first = (told.get("License") or "").strip().partition("\n")[0]
    return {"license": {"name": first}} if first else None


if __name__ == "__main__":
    document = bill(metadata.version(OURS), needed(OURS, "pip"))
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")
