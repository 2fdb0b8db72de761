"""Weights that are encoded in the host cache: a daemon serves them, and the doctor checks them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.run import free_port, running_daemon
from tests.patience import PATIENCE_SECONDS

MODEL = "llama-a"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoded")
    make_checkpoints(folder, [MODEL])
    bind = f"127.0.0.1:{free_port()}"
    path = write_config(folder, [MODEL], bind=bind, instances=1, dtype="bfloat16")
    path.write_text(
        path.read_text().replace("[devices]\n", '[devices]\nhost_cache_codec = "exp7"\n')
    )
    return path


@pytest.fixture(scope="module")
def daemon(file: Path) -> Iterator[tuple[str, int]]:
    with running_daemon(file, load_config(file)) as told:
        yield told


def test_the_doctor_checks_encoded_weights(daemon: tuple[str, int], file: Path) -> None:
    """What is on the device against the image, and the image itself: a bit that changed in the host
    cache is named with its block."""
    url, pid = daemon
    said = chat(url)
    status, told = doctor(file)
    assert status == 0, told
    assert f"weights of {MODEL} on instance 0" in told
    assert "damaged" not in told

    with host_tier(pid).open("r+b", buffering=0) as tier:
        place = first_bytes(tier.fileno()) + 1000
        os.pwrite(tier.fileno(), bytes([os.pread(tier.fileno(), 1, place)[0] ^ 4]), place)

    status, told = doctor(file)
    assert status != 0
    assert "damaged" in told, told
    assert "block 0 of" in file.with_name("daemon.log").read_text(errors="replace")
    assert chat(url) == said


def chat(url: str) -> str:
    asked = {"model": MODEL, "prompt": "the slab", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE_SECONDS)
    return str(answer.raise_for_status().json()["choices"][0]["text"])


def doctor(file: Path) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "appliance", "doctor", "--config", str(file), "--verify"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def host_tier(pid: int) -> Path:
    """The daemon's host cache, whose only image is the model's."""
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if "appliance-host" in str(handle.readlink()):
                return handle
    raise AssertionError("the daemon has no host cache")


def first_bytes(tier: int) -> int:
    """Where the first of its pages that were written begins."""
    return os.lseek(tier, 0, os.SEEK_DATA)
