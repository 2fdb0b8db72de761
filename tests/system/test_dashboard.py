"""The dashboard in a terminal, on a real daemon under load: each key has its effect there."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.client import event_lines
from appliance.config.layers import directory
from appliance.config.loader import load_config
from appliance.demo.checkpoints import write_config
from appliance.demo.run import free_port
from tests.patience import PATIENCE_SECONDS
from tests.system.conftest import until
from tests.tmux import Terminal, terminal
from tests.unit.policies.strangers import install

IDLE = "llama-a"
"""No client asks it for anything."""
CLIENTS = 6
UNSURE = """
    @hookimpl
    def place(self):
        import pathlib
        if not pathlib.Path({path!r}).exists():
            raise RuntimeError('not today')
"""


@dataclass(frozen=True)
class Watched:
    """A daemon under load, and a dashboard that looks at it."""

    admin: httpx.Client
    file: Path
    folder: Path
    screen: Terminal
    events: list[tuple[str, str | None]]
    """What the daemon told since, and of which model."""

    def get(self, path: str) -> Any:
        return self.admin.get(path).raise_for_status().json()

    def shows(self, *texts: str) -> bool:
        screen = self.screen.screen()
        return all(text in screen for text in texts)

    def wait(self, *texts: str) -> None:
        """Until it shows these; otherwise the failure has what it shows instead."""
        try:
            until(lambda: self.shows(*texts))
        except AssertionError:
            pytest.fail(f"not on the screen: {texts}\n{self.screen.screen()}")

    def go(self, view: str, row: str = "") -> None:
        """To a view, with the cursor on its only row that has this text."""
        self.enter(f":{view}")
        if row:
            self.enter(f"/{row}")
            self.wait("(1 of")

    def enter(self, text: str) -> None:
        """In the line at the bottom, which is gone when it was heard."""
        self.screen.type(text)
        self.wait(f"\n{text}")
        self.screen.press("Enter")
        self.wait("? help")

    def leave(self, title: str) -> None:
        """A page. A key right behind Escape would be another key, to any terminal."""
        self.screen.press("Escape")
        until(lambda: not self.shows(title))

    def do(self, key: str, *, told: str, sure: bool = True) -> None:
        """Press the key of an action, say yes if it asks, and read what it tells."""
        self.screen.press(key)
        if sure:
            self.wait("Sure?")
            self.screen.press("y")
        self.wait(told)

    def fill(self, key: str, *fields: str, told: str) -> None:
        """Press the key of an action that has a form, and fill it in from the top."""
        self.screen.press(key)
        self.wait("Enter  do it")
        for number, text in enumerate(fields):
            if number:
                self.screen.press("Tab")
            self.screen.type(text)
        self.screen.press("Enter")
        self.wait(told)


@contextmanager
def daemon(file: Path, socket: Path) -> Iterator[httpx.Client]:
    """One that runs, with all instances up, reached through its admin socket."""
    admin = httpx.Client(
        base_url="http://appliance",
        transport=httpx.HTTPTransport(uds=str(socket)),
        timeout=PATIENCE_SECONDS,
    )
    log = file.with_name("daemon.log")

    def up() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            status = admin.get("/api/status").raise_for_status().json()
        except httpx.TransportError:
            return False  # not listening yet
        return all(instance["state"] == "up" for instance in status["instances"])

    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "appliance", "serve", "--config", str(file)],
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        with admin:
            until(up)
            yield admin
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


@contextmanager
def load(admin: httpx.Client, models: list[str]) -> Iterator[None]:
    """Clients that ask these models for something all the time."""
    over = threading.Event()

    def ask(number: int) -> None:
        dice = random.Random(number)
        while not over.is_set():
            body = {
                "model": dice.choice(models),
                "messages": [{"role": "user", "content": f"Tell me of {dice.random()}"}],
                "max_tokens": 40,
            }
            answer = admin.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask, number) for number in range(CLIENTS)]
        try:
            yield
        finally:
            over.set()
    for client in asking:
        client.result()


@contextmanager
def events(admin: httpx.Client) -> Iterator[list[tuple[str, str | None]]]:
    """A list that grows by what the daemon tells."""
    heard: list[tuple[str, str | None]] = []
    over = threading.Event()

    def hear() -> None:
        with admin.stream("GET", "/api/events") as answer:
            for line in event_lines(answer.iter_bytes()):
                if over.is_set():
                    return
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: ") and kind != "snapshot":
                    facts = json.loads(line.removeprefix("data: "))["facts"]
                    heard.append((kind, facts.get("model")))

    listener = threading.Thread(target=hear)
    listener.start()
    try:
        yield heard
    finally:
        over.set()
        listener.join()


@pytest.fixture(scope="module")
def watched(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    text = write_config(checkpoints, bind=f"127.0.0.1:{free_port()}").read_text()
    socket = folder / "admin.sock"
    text = text.replace(
        'admin_socket = ""', f'admin_socket = "{socket}"\nkeys = "keys.json"\nopen_metrics = true'
    )
    file = folder / "appliance.toml"
    file.write_text(f"{text}\n[batches]\ndirectory = {str(folder / 'batches')!r}\n")
    install(folder, "unsure", UNSURE.format(path=str(folder / "sure")))
    models = [model.name for model in load_config(file).models if model.name != IDLE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        with (
            daemon(file, socket) as admin,
            events(admin) as heard,
            load(admin, models),
            terminal(
                folder,
                [sys.executable, "-m", "appliance", "top", "--connect", f"unix:{socket}"],
            ) as screen,
        ):
            found = Watched(admin, file, folder, screen, heard)
            found.wait("Overview", "qwen3-a")
            yield found


def held(watched: Watched, model: str) -> bool:
    """Whether it has memory on a device."""
    return any(
        size and owner.endswith(f":{model}")
        for instance in watched.get("/api/status")["instances"]
        for owner, size in instance["pool_bytes"].items()
    )


def test_models(watched: Watched) -> None:
    """Loaded, pinned, drained, limited, evicted, and each of it taken back."""

    def model() -> Any:
        return watched.get(f"/api/models/{IDLE}")

    watched.go("models", IDLE)
    watched.do("L", told=f"{IDLE} is loaded to a device", sure=False)
    until(lambda: ("model_loaded", IDLE) in watched.events)
    watched.do("P", told=f"{IDLE} is pinned", sure=False)
    assert model()["terms"]["pinned"]
    watched.do("U", told=f"{IDLE} is not pinned", sure=False)
    assert not model()["terms"]["pinned"]
    watched.do("D", told=f"{IDLE} takes no new requests")
    assert model()["draining"]
    watched.do("R", told=f"{IDLE} takes requests", sure=False)
    assert not model()["draining"]
    watched.fill("l", "7s", "300ms", "5", told=f"{IDLE}: first token 7 s")
    terms = model()["terms"]
    assert (terms["slo"]["ttft_seconds"], terms["slo"]["tbt_seconds"]) == (7, 0.3)
    assert terms["max_queue"] == 5
    watched.do("E", told=f"{IDLE} leaves its devices")
    until(lambda: ("model_evict_requested", IDLE) in watched.events)
    until(lambda: not held(watched, IDLE))


def test_a_request_is_cancelled(watched: Watched) -> None:
    body = {
        "model": "qwen2-a",
        "messages": [{"role": "user", "content": "Tell me everything"}],
        "max_tokens": 900,
        "ignore_eos": True,
    }

    def mine() -> list[str]:
        live = watched.get("/api/requests")["requests"]
        return [one["id"] for one in live if one["max_tokens"] == body["max_tokens"]]

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(watched.admin.post, "/v1/chat/completions", json=body)
        until(lambda: mine() != [])
        (request,) = mine()
        watched.go("requests", request)
        watched.do("K", told="cancelled")  # the identifier after it does not fit in the line
        answer = asked.result()

    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")


def test_policies(watched: Watched) -> None:
    """Others are set, compared, taken back; one that failed too often is asked again."""

    def active() -> list[str]:
        found: list[str] = watched.get("/api/policies")["active"]["use"]
        return found

    def failed() -> bool:
        return any(one["disabled"] for one in watched.get("/api/policies")["policies"])

    watched.go("policies")
    watched.fill("e", "serverlessllm", told="serverlessllm decide from now on")
    assert active() == ["serverlessllm"]
    watched.screen.press("c")
    watched.wait("now and before", "appliance")
    watched.leave("now and before")
    watched.do("B", told="appliance decide again")
    assert active() == ["appliance"]

    watched.fill("e", "unsure,appliance", told="unsure, appliance decide from now on")
    until(failed)
    (watched.folder / "sure").touch()
    watched.go("policies", "place")
    watched.do("E", told="unsure: asked again", sure=False)
    assert not failed()
    watched.do("B", told="appliance decide again")


def test_the_configuration_is_reloaded(watched: Watched) -> None:
    directory(watched.file).mkdir(exist_ok=True)
    (directory(watched.file) / "60-mine.toml").write_text("[api]\nmax_queue = 77\n")
    watched.go("config", "api.max_queue")
    watched.wait("77")

    watched.do("R", told="1 applied, 0 wait")

    until(lambda: watched.get("/api/config")["config"]["api"]["max_queue"] == 77)


def test_a_batch_is_cancelled(watched: Watched) -> None:
    lines = "".join(
        json.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": "qwen2-b",
                    "messages": [{"role": "user", "content": f"Tell me of {number}"}],
                    "max_tokens": 900,
                    "ignore_eos": True,
                },
            }
        )
        + "\n"
        for number in range(40)
    )
    file = watched.admin.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", lines.encode())}
    )
    body = {
        "input_file_id": file.raise_for_status().json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    batch = watched.admin.post("/v1/batches", json=body).raise_for_status().json()["id"]

    watched.go("batches", batch)
    watched.do("K", told="is cancel")

    until(lambda: watched.get(f"/v1/batches/{batch}")["status"] == "cancelled")


def test_keys(watched: Watched) -> None:
    """One is made, shown once, opens what it is for, and is taken back."""

    def opens(secret: str) -> bool:
        url = "http://" + watched.get("/api/config")["config"]["api"]["bind"]
        headers = {"authorization": f"Bearer {secret}"}
        return httpx.get(f"{url}/v1/models", headers=headers, timeout=PATIENCE_SECONDS).is_success

    watched.go("keys")
    watched.fill("c", "visitor", told="sk-")
    secret = next(word for word in watched.screen.screen().split() if word.startswith("sk-"))
    watched.screen.press("Escape")
    until(lambda: watched.shows("visitor") and not watched.shows(secret))
    assert opens(secret)
    watched.go("keys", "visitor")
    watched.do("K", told="visitor is revoked")
    until(lambda: not opens(secret))


def test_a_chat(watched: Watched) -> None:
    """A question is answered until that is enough, and the answer says what it took."""

    def live() -> list[str]:
        requests = watched.get("/api/requests")["requests"]
        return [one["id"] for one in requests if one["model"] == IDLE]

    watched.go(f"chat {IDLE}")
    watched.wait("Enter sends")
    watched.screen.type("Say something")
    watched.screen.press("Enter")
    until(lambda: live() != [])
    watched.wait("> Say something", "(1 answering)")
    watched.screen.press("Escape")
    watched.wait(f"i: write to {IDLE}")
    watched.screen.press("x")
    watched.wait("first token")
    until(lambda: live() == [])


def seconds_until(true: Callable[[], bool]) -> float:
    began = time.monotonic()
    until(true)
    return time.monotonic() - began


def test_what_happens_is_seen(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    """Another policy, and a worker that is killed. How soon is told, not asserted."""
    watched.go("policies")
    until(lambda: not watched.shows("serverlessllm"))
    watched.admin.put("/api/policies", json={"use": ["serverlessllm"]}).raise_for_status()
    swap = seconds_until(lambda: watched.shows("serverlessllm"))
    watched.admin.post("/api/policies/rollback").raise_for_status()

    watched.go("overview")
    instance = watched.get("/api/status")["instances"][0]
    watched.wait("0 mixed  up")
    os.kill(instance["pid"], signal.SIGKILL)
    kill = seconds_until(lambda: watched.shows("lost") or watched.shows("starting"))
    until(lambda: all(one["state"] == "up" for one in watched.get("/api/status")["instances"]))

    with capsys.disabled():
        sys.stdout.write(f"seen: policies after {swap:.2f} s, a lost worker after {kill:.2f} s\n")
