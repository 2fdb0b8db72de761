"""Builds the Debian package: ``python packaging/build_deb.py [--output DIR]``, or ``make deb``.

The package has a virtual environment of its own under /opt/appliance with what the appliance needs
and not the engine, which is larger by far (``appliance-engine install``). It is made of what is
installed where this runs, so that what was tested is what is packaged, and needs no network.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata as metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Final

from sbom import LISTS, bill, needed

ROOT = Path(__file__).parents[1]
HOME = Path("/opt/appliance")
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"

CONTROL = """\
Package: appliance
Version: {version}
Architecture: {architecture}
Maintainer: {maintainer}
Installed-Size: {kibibytes}
Depends: {python}, {libraries}, passwd, systemd
Section: net
Priority: optional
Description: serves many language models from the memory of a few
 One daemon owns the GPUs (or the CPU) of a box, takes requests for dozens of
 models over HTTP, and decides token by token which model runs next.
 .
 The engine, vLLM, is not in this package: appliance-engine(8) installs it.
"""


def build(output: Path, version: str | None = None) -> Path:
    """The package, written into `output`. `version` is that of the appliance unless given.

    Raises `CalledProcessError` if a tool fails, `PackageNotFoundError` if a dependency is missing.
    """
    architecture = _run("dpkg", "--print-architecture").strip()
    with tempfile.TemporaryDirectory(prefix="appliance-deb-") as scratch:
        work = Path(scratch)
        tree = work / "tree"
        own = _stage_environment(tree, work)
        version = version or own
        _stage_system(tree)
        _stage_changes(tree / "usr" / "share" / "doc" / "appliance", version)
        size = sum(path.lstat().st_size for path in tree.rglob("*")) // 1024
        control = tree / "DEBIAN"
        control.mkdir()
        (control / "control").write_text(
            CONTROL.format(
                version=version,
                architecture=architecture,
                kibibytes=size,
                python=PYTHON,
                maintainer=maintainer(),
                libraries=", ".join(needed_libraries(tree)),
            )
        )
        for script in ("postinst", "prerm", "postrm"):
            _install(ROOT / "packaging" / "deb" / script, control / script, 0o755)
        package = output.resolve() / f"appliance_{version}_{architecture}.deb"
        output.mkdir(parents=True, exist_ok=True)
        _run("dpkg-deb", "--root-owner-group", "-Zxz", "-z1", "--build", str(tree), str(package))
    return package


def _stage_environment(tree: Path, work: Path) -> str:
    """The virtual environment; returns the version of the appliance in it."""
    home = tree / HOME.relative_to("/")
    site = home / "lib" / PYTHON / "site-packages"
    site.mkdir(parents=True)
    (home / "bin").mkdir()
    for name in ("python", "python3", PYTHON):
        (home / "bin" / name).symlink_to(f"/usr/bin/{PYTHON}")
    (home / "pyvenv.cfg").write_text(
        "home = /usr/bin\ninclude-system-site-packages = false\n"
        f"version = {'.'.join(map(str, sys.version_info[:3]))}\n"
    )
    version = _unpack_ourselves(site, work)
    packaged = list(needed("appliance", "pip"))
    for distribution in packaged:
        _copy(distribution, site)
    # Behind the packages of this environment, and ignored while they do not exist.
    (site / "appliance-engine.pth").write_text("../../../engine\n../../../policies\n")
    script = home / "bin" / "appliance"
    script.write_text(
        f"#!{HOME}/bin/python\nimport sys\n\nfrom appliance.__main__ import main\n\n"
        'if __name__ == "__main__":\n    sys.exit(main())\n'
    )
    script.chmod(0o755)
    share = home / "share"
    share.mkdir()
    for list_, name in LISTS.items():
        _install(ROOT / "requirements" / list_, share / f"{name}.txt")
    documents = tree / "usr" / "share" / "doc" / "appliance"
    documents.mkdir(parents=True)
    (documents / "sbom.cdx.json").write_text(json.dumps(bill(version, packaged), indent=1) + "\n")
    return version


def _unpack_ourselves(site: Path, work: Path) -> str:
    """Build a wheel of a copy of the sources, as building leaves things behind; unpack it."""
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("appliance", "tui"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    _run(
        sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet",
        "--no-deps", "--no-build-isolation", "--no-index", "-w", str(work), str(source),
    )  # fmt: skip
    (wheel,) = work.glob("appliance-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return wheel.name.split("-")[1]


def _copy(distribution: metadata.Distribution, site: Path) -> None:
    """The files that it recorded, without scripts, its own tests, and what was compiled."""
    for file in distribution.files or ():
        if {"..", "__pycache__", "tests"} & set(file.parts):
            continue
        _install(str(file.locate()), site / file)


def _stage_system(tree: Path) -> None:
    """What lies outside /opt: units, users, manual pages, completions, documents."""
    units, shared = tree / "usr" / "lib" / "systemd" / "system", tree / "usr" / "share"
    source = ROOT / "packaging" / "systemd"
    for name in ("appliance.service", "appliance.socket"):
        _install(source / name, units / name)
    library = tree / "usr" / "lib"
    _install(source / "appliance.sysusers", library / "sysusers.d" / "appliance.conf")
    _install(source / "appliance.tmpfiles", library / "tmpfiles.d" / "appliance.conf")
    _link(tree / "usr" / "bin" / "appliance", HOME / "bin" / "appliance")
    _install(ROOT / "packaging/deb/appliance-engine", tree / "opt/appliance/bin/appliance-engine")
    (tree / "opt/appliance/bin/appliance-engine").chmod(0o755)
    _link(tree / "usr" / "sbin" / "appliance-engine", HOME / "bin" / "appliance-engine")
    _stage_pages(shared / "man")
    for shell, path in (
        ("bash", "bash-completion/completions/appliance"),
        ("zsh", "zsh/vendor-completions/_appliance"),
        ("fish", "fish/vendor_completions.d/appliance.fish"),
    ):
        (shared / path).parent.mkdir(parents=True)
        (shared / path).write_text(_completion(shell))
    documents = shared / "doc" / "appliance"
    _install(ROOT / "etc" / "appliance.toml", documents / "examples" / "appliance.toml")
    _install(ROOT / "packaging" / "grafana" / "appliance.json", documents / "grafana.json")
    _install(ROOT / "packaging" / "prometheus" / "alerts.yaml", documents / "alerts.yaml")
    _install(ROOT / "packaging" / "deb" / "copyright", documents / "copyright")
    # The sample, messages and manual pages name them so.
    shutil.copytree(ROOT / "docs", documents / "docs", copy_function=_install)
    overrides = ROOT / "packaging" / "deb" / "lintian-overrides"
    _install(overrides, shared / "lintian" / "overrides" / "appliance")


def maintainer() -> str:
    """Who builds the package, as Debian's tools are told: `DEBFULLNAME` and `DEBEMAIL`."""
    name = os.environ.get("DEBFULLNAME", "The appliance's maintainers")
    return f"{name} <{os.environ.get('DEBEMAIL', 'maintainers@appliance.example')}>"


_LIBRARIES: Final = {
    b"libstdc++.so.6": "libstdc++6",
    b"libgcc_s.so.1": "libgcc-s1",
    b"libz.so.1": "zlib1g",
}
"""Debian's packages of libraries, besides the C library, that compiled modules may need."""


def needed_libraries(tree: Path) -> list[str]:
    """The packages that what is compiled in `tree` needs: the C library, of the newest version that
    it names, and others."""
    newest, others = (2, 28), set()
    for path in tree.rglob("*.so*"):
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        versions = re.findall(rb"\0GLIBC_2\.(\d+)", content)
        newest = max([newest, *((2, int(minor)) for minor in versions)])
        others |= {package for name, package in _LIBRARIES.items() if b"\0" + name in content}
    return [f"libc6 (>= {newest[0]}.{newest[1]})", *sorted(others)]


def _stage_changes(documents: Path, version: str) -> None:
    """The changelog, and Debian's, which has an entry for each version that is built."""
    source = ROOT / "CHANGELOG.md"
    when = int(os.environ.get("SOURCE_DATE_EPOCH", source.stat().st_mtime))
    entry = (
        f"appliance ({version}) unstable; urgency=medium\n\n"
        "  * What changed is in CHANGELOG.md.gz.\n\n"
        f" -- {maintainer()}  {format_datetime(datetime.fromtimestamp(when, UTC))}\n"
    )
    documents.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("changelog.gz", entry.encode()),
        ("CHANGELOG.md.gz", source.read_bytes()),
    ):
        (documents / name).write_bytes(gzip.compress(content, mtime=0))


def _stage_pages(directory: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        _run(sys.executable, "-m", "appliance.cli.docs.manpages", scratch)
        shutil.copy(ROOT / "packaging" / "deb" / "appliance-engine.8", scratch)
        for page in Path(scratch).iterdir():
            target = directory / f"man{page.suffix[1:]}" / f"{page.name}.gz"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(gzip.compress(page.read_bytes(), mtime=0))


def _completion(shell: str) -> str:
    """The script that click makes for the command."""
    environment = {**os.environ, "_APPLIANCE_COMPLETE": f"{shell}_source", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "appliance"], env=environment, check=True, capture_output=True
    )
    return done.stdout.decode()


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _install(source: Path | str, target: Path | str, mode: int = 0o644) -> None:
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def _run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, cwd="/")
    return done.stdout.decode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--version", help="instead of the appliance's own")
    arguments = parser.parse_args()
    sys.stdout.write(f"{build(arguments.output, arguments.version)}\n")
