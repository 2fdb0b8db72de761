"""Parts of the Debian package: its changelog, its dependencies, its scripts, policies beside it."""

from __future__ import annotations

import gzip
import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.patience import PATIENCE_SECONDS

PACKAGING = Path(__file__).parents[3] / "packaging"


@pytest.fixture
def build_deb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(PACKAGING)
    return importlib.import_module("build_deb")


def test_the_changelog_is_debians(
    build_deb: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry of this version, and the appliance's own beside it."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setenv("DEBFULLNAME", "A Builder")
    monkeypatch.setenv("DEBEMAIL", "builder@appliance.example")
    build_deb._stage_changes(tmp_path, "1.2.3")

    entry = gzip.decompress((tmp_path / "changelog.gz").read_bytes()).decode()
    assert re.fullmatch(
        r"appliance \(1\.2\.3\) unstable; urgency=medium\n\n  \* .*\n\n"
        r" -- A Builder <builder@appliance\.example>  Tue, 14 Nov 2023 22:13:20 \+0000\n",
        entry,
    )
    changes = gzip.decompress((tmp_path / "CHANGELOG.md.gz").read_bytes()).decode()
    assert changes == (PACKAGING.parent / "CHANGELOG.md").read_text(encoding="utf-8")


def test_a_maintainer_can_be_written_to(build_deb: ModuleType) -> None:
    assert "localhost" not in build_deb.maintainer()
    assert re.fullmatch(r"[^<>]+ <[^@<>]+@[^@<>]+\.[a-z]+>", build_deb.maintainer())


def test_libraries_are_those_that_modules_name(build_deb: ModuleType, tmp_path: Path) -> None:
    """The C library of the newest version that is asked for."""
    (tmp_path / "one.so").write_bytes(b"\x7fELF\0GLIBC_2.4\0GLIBC_2.34\0libc.so.6\0")
    (tmp_path / "two.cpython-311.so.1").write_bytes(b"\0GLIBC_2.17\0libstdc++.so.6\0")
    (tmp_path / "text.py").write_bytes(b"\0GLIBC_2.99\0libgcc_s.so.1\0")
    assert build_deb.needed_libraries(tmp_path) == ["libc6 (>= 2.34)", "libstdc++6"]
    (tmp_path / "one.so").unlink()
    assert build_deb.needed_libraries(tmp_path) == ["libc6 (>= 2.28)", "libstdc++6"]


def test_documents_are_where_messages_and_the_sample_say(
    build_deb: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_deb, "_completion", lambda shell: "")
    build_deb._stage_system(tmp_path)
    documents = tmp_path / "usr/share/doc/appliance"
    sample = (documents / "examples/appliance.toml").read_text(encoding="utf-8")
    named = set(re.findall(r"docs/[\w/-]+\.md", sample))

    assert named
    assert all((documents / name).is_file() for name in named)
    assert (documents / "copyright").read_text().startswith("Format: ")
    assert (tmp_path / "usr/share/lintian/overrides/appliance").is_file()
    for page in ("man1/appliance.1", "man5/appliance.toml.5", "man8/appliance-engine.8"):
        assert (tmp_path / "usr/share/man" / f"{page}.gz").is_file()
    modes = {oct(path.stat().st_mode)[-3:] for path in documents.rglob("*") if path.is_file()}
    assert modes == {"644"}


@pytest.mark.parametrize("name", ["postinst", "prerm", "postrm", "appliance-engine"])
def test_scripts_can_be_read_by_a_shell(name: str) -> None:
    done = subprocess.run(["sh", "-n", str(PACKAGING / "deb" / name)], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_bytecode_leaves_with_the_files_that_it_is_of(tmp_path: Path) -> None:
    """The package has none: it is compiled where it is installed."""
    cache = tmp_path / "opt/appliance/lib/python3.11/site-packages/x/__pycache__"
    cache.mkdir(parents=True)
    (cache / "x.pyc").touch()
    (cache.parent / "x.py").touch()
    for _ in range(2):
        subprocess.run(
            ["sh", str(PACKAGING / "deb" / "prerm"), "upgrade"],
            env={**os.environ, "DPKG_ROOT": str(tmp_path)},
            check=True,
        )
    assert [path.name for path in cache.parent.iterdir()] == ["x.py"]


# --- policies ------------------------------------------------------------------------------------


class Installed:
    """The package's command, as if the package were in a folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "bin").mkdir()
        python = home / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        self._script = shutil.copy(PACKAGING / "deb" / "appliance-engine", home / "bin")

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._script, *words], capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )


@pytest.fixture
def engine(tmp_path: Path) -> Installed:
    (home := tmp_path / "home").mkdir()
    return Installed(home)


def policy_wheel(folder: Path) -> Path:
    """A package with one policy, which asks for a package that there is not."""
    wheel, info = folder / "night_shift-2.0-py3-none-any.whl", "night_shift-2.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("night_shift/__init__.py", "class Night: ...\n")
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: night-shift\nVersion: 2.0\nRequires-Dist: appliance\n",
        )
        archive.writestr(
            f"{info}/entry_points.txt", "[appliance.policies]\nnight = night_shift:Night\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_a_policy_is_added_listed_and_removed(engine: Installed, tmp_path: Path) -> None:
    """Where the package's Python finds it, without what it depends on."""
    done = engine("policy", "add", str(policy_wheel(tmp_path)), "--no-index")
    assert done.returncode == 0, done.stderr
    assert (engine.home / "policies/night_shift/__init__.py").is_file()
    assert engine("policy", "list").stdout == "night-shift 2.0\n"

    assert engine("policy", "remove", "night-shift").returncode == 0
    assert engine("policy", "list").stdout == ""
    assert list((engine.home / "policies").iterdir()) == []
    missing = engine("policy", "remove", "night-shift")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "there is no night-shift" in missing.stderr


@pytest.mark.parametrize("words", [(), ("add",), ("remove",), ("list", "all"), ("find", "x")])
def test_what_is_not_understood_is_explained(engine: Installed, words: tuple[str, ...]) -> None:
    done = engine("policy", *words)
    assert done.returncode == 2
    assert "policy add WHEEL" in done.stderr
    assert not (engine.home / "policies").exists()


def test_the_package_finds_policies_and_the_engine(build_deb: ModuleType) -> None:
    """They are on the path of its Python."""
    source = Path(build_deb.__file__).read_text(encoding="utf-8")
    assert r'"../../../engine\n../../../policies\n"' in source
