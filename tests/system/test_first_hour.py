"""Models are served without a configuration: from a directory, and by `run` alone, on real vLLM."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

from appliance.demo.checkpoints import make_checkpoints
from appliance.demo.run import free_port
from tests.hub import hub
from tests.patience import PATIENCE_SECONDS, until
from tests.prose import ROOT

SERVED, FROM_HUB, LATER = "llama-a", "qwen2-a", "llama-b"
PROGRAM = (sys.executable, "-m", "appliance")


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with nothing, in a session."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }


@contextmanager
def serving(arguments: tuple[str, ...], environment: dict[str, str], log: Path) -> Iterator[str]:
    """A daemon from the command line; its URL. It ends well."""
    bind = f"127.0.0.1:{free_port()}"
    with log.open("wb") as stream:
        daemon = subprocess.Popen(
            [*PROGRAM, "serve", *arguments, "--bind", bind], stderr=stream, env=environment
        )
    try:
        url = f"http://{bind}"
        until(lambda: is_ready(url) or daemon.poll() is not None)
        assert daemon.poll() is None, log.read_text()
        yield url
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(PATIENCE_SECONDS) == 0
    finally:
        daemon.kill()
        daemon.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=PATIENCE_SECONDS).is_success
    except httpx.TransportError:
        return False


def test_a_directory_is_served(checkpoints: Path, home: dict[str, str], tmp_path: Path) -> None:
    """Under the names of what is in it; what is no model that is served is a line of the log."""
    models = tmp_path / "models"
    models.mkdir()
    (models / SERVED).symlink_to(checkpoints / SERVED)
    (models / "q4.gguf").touch()
    log = tmp_path / "log"

    with serving((str(models), "--model", f"named={checkpoints / LATER}"), home, log) as url:
        listed = httpx.get(f"{url}/v1/models", timeout=PATIENCE_SECONDS).json()["data"]
        body = {
            "model": SERVED,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 4,
            "temperature": 0,
        }
        answered = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS)

    assert {model["id"] for model in listed} == {SERVED, "named"}
    assert answered.status_code == 200, answered.text
    assert answered.json()["usage"]["completion_tokens"] > 0
    assert f"not served: {models}/q4.gguf: GGUF is not supported" in log.read_text()


def test_the_three_commands_of_the_readme(home: dict[str, str], tmp_path: Path) -> None:
    """They print what it shows, but for times, sizes, processes and the words of an answer."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```console\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    serve, run, ps = block.removeprefix("$ appliance ").split("\n$ appliance ")
    models = tmp_path / shlex.split(serve.partition("\n")[0])[1]
    make_checkpoints(models, re.findall(r"^(\S+) .*:(?:cold|loaded) ", ps, re.MULTILINE))
    log = tmp_path / "log"

    with serving((str(models),), home, log) as url:
        until(lambda: "instance 0 is up" in log.read_text())
        answer = printed(run, home | {"APPLIANCE_URL": url})
        # At the admin socket. One model answers while engines of others are built.
        until(lambda: "building" not in printed(ps, home))
        now = printed(ps, home)

    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    logged = {without_numbers(json.loads(line)["message"]) for line in lines}
    said = [line.split(": ", 1)[1] for line in serve.splitlines()[1:] if line != "..."]
    assert [one for one in said if without_numbers(one) not in logged] == []
    assert answer.strip()
    assert words(now) == words(ps.partition("\n")[2])


def printed(example: str, environment: dict[str, str]) -> str:
    """What the command in an example's first line prints."""
    return subprocess.run(
        [*PROGRAM, *shlex.split(example.partition("\n")[0])],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    ).stdout


def without_numbers(line: str) -> str:
    return re.sub(r"[0-9.,:]+(KiB|MiB|GiB)?", "", line)


def words(table: str) -> list[list[str]]:
    """The cells of its lines that are no numbers."""
    lines = [without_numbers(line).split() for line in table.splitlines()]
    return [line for line in lines if line]


def test_run_needs_nothing(checkpoints: Path, home: dict[str, str], tmp_path: Path) -> None:
    """It pulls a model of a hub, starts a daemon, and answers. The daemon goes on, and pulls the
    next model by itself: for this user, not for others on TCP."""
    url = f"http://127.0.0.1:{free_port()}"
    repositories = {f"demo/{name}": checkpoints / name for name in (FROM_HUB, LATER)}
    pids: list[int] = []

    def run(model: str) -> str:
        said = tmp_path / "said"
        try:
            with said.open("w") as stream:
                done = subprocess.run(
                    [*PROGRAM, "run", model, "Once", "--max-tokens", "4", "--url", url],
                    env=home,
                    stdout=subprocess.PIPE,
                    stderr=stream,
                    text=True,
                    timeout=2 * PATIENCE_SECONDS,  # its own limits come first, and say why
                )
        finally:
            words = said.read_text()
            pids.extend(map(int, re.findall(r"stop it with: kill (\d+)", words)))
        assert done.returncode == 0, words
        assert done.stdout.endswith("\n")
        return words

    with hub(repositories) as endpoint:
        home["HF_ENDPOINT"] = endpoint
        try:
            first = run(f"demo/{FROM_HUB}")
            second = run(f"demo/{LATER}")
            by_others = httpx.post(
                f"{url}/api/pull", json={"model": f"demo/{LATER}"}, timeout=PATIENCE_SECONDS
            )
        finally:
            stop(pids)

    assert "fetched model.safetensors" in first
    assert "fetched model.safetensors" in second
    assert len(pids) == 1
    assert by_others.status_code == 403, by_others.text
    assert not is_ready(url)
    folder = tmp_path / "data" / "appliance" / "models"
    assert {path.name for path in folder.iterdir()} == {f"demo--{FROM_HUB}", f"demo--{LATER}"}
    (log,) = (tmp_path / "state" / "appliance").glob("*.log")
    assert str(log) in first


def stop(pids: list[int]) -> None:
    """As the command says how, and until they are gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for pid in pids:
        try:
            until(partial(ended, pid))
        finally:
            if not ended(pid):
                os.kill(pid, signal.SIGKILL)


def ended(pid: int) -> bool:
    """A process that ended may wait for its parent, which is none of ours."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"
