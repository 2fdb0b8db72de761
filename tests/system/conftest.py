"""A real daemon on real vLLM, six small models, and what plain vLLM says to the same prompts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import anthropic
import filelock
import httpx
import msgspec
import ollama
import openai
import pytest

from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.recipes import RECIPES
from appliance.demo.run import Known, free_port, metrics_by_model, running_daemon
from appliance.demo.run import answered as plain_answers
from appliance.demo.traffic import ChatRequest, burst
from benchmarks.endurance.asks import with_tool_parser
from tests.parrot import make_parrot
from tests.patience import PATIENCE_SECONDS

CHATS_PER_MODEL = 8
MEMORY_BYTES = 48 << 20


LONGEST = (
    "test_front_ends",
    "test_chaos",
    "test_kv_on_disk",
    "test_endurance",
    "test_restart",
    "test_usage",
    "test_policies",
    "test_kinds",
    "test_pool",
    "test_quantized",
    "test_images",
    "test_kills",
    "test_operators",
    "test_catalogue",
    "test_ranks",
)
"""Files that begin first, the longest before all, so that no process is left alone at the end."""
SHARING = ("test_guides_and_tools", "test_dialects", "test_openai_client", "test_thinking")
"""Files that share a daemon, which begin last: it is not there beside those of others."""
ALWAYS = (*SHARING, "test_demo", "test_first_hour", "test_keys", "test_kills", "test_restart")
"""Files of which `make test` plays all; the others are thorough."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST, -len(LONGEST))}
    order |= {name: place for place, name in enumerate(SHARING, 1)}
    items.sort(key=lambda item: order.get(item.path.stem, 0))
    for item in items:
        if "tests/system" in str(item.path):
            item.add_marker(pytest.mark.system)
            if item.path.stem not in ALWAYS:
                item.add_marker(pytest.mark.thorough)


@pytest.fixture(scope="session", autouse=True)
def _authorities_read_once() -> Iterator[None]:
    """Every client of `httpx` reads the list of certificate authorities anew, which takes a
    processor for 70 ms: longer than the answers that tests poll for, and on two processors a test
    that asks again and again would keep the daemon from what it waits for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "httpx._transports.default.create_ssl_context", cache(httpx.create_ssl_context)
        )
        yield


def copy_with_context(checkpoint: Path, copy: Path, tokens: int) -> None:
    """Copy a checkpoint, for a context of so many tokens."""
    shutil.copytree(checkpoint, copy)
    described = copy / "config.json"
    longer = json.loads(described.read_text()) | {"max_position_embeddings": tokens}
    described.write_text(json.dumps(longer))


@dataclass(frozen=True)
class Appliance:
    """A running daemon, from outside."""

    url: str
    pid: int
    config: Config
    journal: Path

    def status(self) -> dict:
        return (
            httpx.get(f"{self.url}/api/status", timeout=PATIENCE_SECONDS).raise_for_status().json()
        )

    def metrics(self) -> dict[tuple[str, str], float]:
        return metrics_by_model(self.url)

    def busy(self, name: str) -> bool:
        """Whether a model has requests."""
        (mine,) = (model for model in self.status()["models"] if model["model"] == name)
        return bool(mine["running"] + mine["waiting"])

    def cancelled(self, name: str) -> float:
        """How many requests of a model were cancelled so far; all of them, if it is not busy."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_SECONDS).text
        series = f'appliance_requests_total{{model="{name}",outcome="cancelled"}} '
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(series))

    def worker_pids(self) -> list[int]:
        return [instance["pid"] for instance in self.status()["instances"] if instance["pid"]]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes of this run of pytest."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    make_checkpoints(directory)
    return directory


@contextmanager
def start(
    checkpoints: Path,
    policy: str,
    instances: int = 2,
    models: Sequence[str] | None = None,
    more: str = "",
    tool_parser: str = "",
    budget: str = "",
) -> Iterator[Appliance]:
    """A daemon of its own, on a free port, with a journal, a folder for batches, and `more` of a
    configuration; gone afterwards. All models have the `tool_parser`, if one is named; a policy
    that is not ours has the `budget` for an answer, if one is given."""
    file = write_config(
        checkpoints, models, policy=policy, instances=instances, bind=f"127.0.0.1:{free_port()}"
    )
    journal = checkpoints / f"journal-{policy}-{instances}.jsonl"
    batches = checkpoints.with_name(f"{checkpoints.name}-batches-{policy}-{instances}")
    tables = f"[journal]\npath = {str(journal)!r}\n[batches]\ndirectory = {str(batches)!r}\n"
    text = file.read_text()
    if budget:
        text = text.replace("[policy]\n", f"[policy]\nbudget = {budget!r}\n")
    if tool_parser:
        text = with_tool_parser(text, tool_parser)
    file.write_text(f"{text}\n{more}\n{tables}")
    config = load_config(file)
    with running_daemon(file, config) as (url, pid):
        yield Appliance(url, pid, config, journal)


HERMES, THINKER, EMBEDDER = "qwen3-a", "thinker", "vectors"
"""Of the daemon that clients share: a model with a tool parser, a parrot that thinks and calls, and
a model that generates, served a second time: the state of its last token is a vector."""


@pytest.fixture(scope="session")
def appliance(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Appliance]:
    """The daemon of all tests with official clients: one instance, the six models and three more,
    batches. What a test changes of it, it changes back."""
    folder = tmp_path_factory.mktemp("shared")
    make_parrot(checkpoints / "llama-a", folder / THINKER)
    text = write_config(checkpoints, instances=1, bind=f"127.0.0.1:{free_port()}").read_text()
    named = f'name = "{HERMES}"\n'
    text = text.replace(named, f'{named}tool_parser = "hermes"\n')
    file = folder / "appliance.toml"
    file.write_text(
        f"""{text}
[batches]
directory = "batches"

[[model]]
name = "{THINKER}"
path = "{THINKER}"
max_context = 2048
dtype = "float32"
tool_parser = "hermes"
reasoning_parser = "qwen3"

[[model]]
name = "{EMBEDDER}"
path = {str(checkpoints / "qwen3-a")!r}
max_context = 512
dtype = "float32"
task = "embed"
"""
    )
    config = load_config(file)
    with running_daemon(file, config) as (url, pid):
        yield Appliance(url, pid, config, Path())


@pytest.fixture(scope="session")
def client(appliance: Appliance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{appliance.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def claude(appliance: Appliance) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=appliance.url, api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def llama(appliance: Appliance) -> Iterator[ollama.Client]:
    with ollama.Client(appliance.url) as made:
        yield made


def until(true: Callable[[], bool]) -> None:
    """Ask again and again until it is so: the daemon is another process."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def chats(checkpoints: Path) -> list[ChatRequest]:
    names = sorted(path.name for path in checkpoints.iterdir() if path.is_dir())
    assert len(names) == len(RECIPES), f"another test left models among {names}"
    return burst(names, CHATS_PER_MODEL)


@pytest.fixture(scope="session")
def answered(checkpoints: Path, chats: list[ChatRequest], shared: Path) -> dict[ChatRequest, Known]:
    """Every chat on plain vLLM, undisturbed; the first process to ask computes them."""
    answers = shared / "answered.json"
    with filelock.FileLock(shared / "answered.lock"):
        if not answers.exists():
            known = plain_answers(load_config(write_config(checkpoints)), chats)
            answers.write_bytes(msgspec.json.encode([known[chat] for chat in chats]))
        outputs = msgspec.json.decode(answers.read_bytes(), type=list[Known])
    return dict(zip(chats, outputs, strict=True))


@pytest.fixture(scope="session")
def expected(answered: dict[ChatRequest, Known]) -> dict[ChatRequest, list[int]]:
    """The tokens of these answers."""
    return {chat: answer.tokens for chat, answer in answered.items()}


def memfds(pid: int, name: str) -> list[os.stat_result]:
    """The memfds of a process with this name, each file once."""
    found = {}
    directory = Path(f"/proc/{pid}/fd")
    for entry in directory.iterdir():
        try:
            if str(entry.readlink()).startswith(f"/memfd:{name}"):
                stat = entry.stat()
                found[stat.st_ino] = stat
        except FileNotFoundError:
            continue  # closed since it was listed
    return list(found.values())


def private_bytes(pid: int) -> int:
    """Resident anonymous memory of a process: what is in no file, so in no pool."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel tells no RssAnon")


def mapped_bytes(pid: int, name: str) -> int:
    """Resident bytes of the process's mappings of memfds with this name.

    The process is stopped meanwhile: the kernel tells of one mapping after the other, and would
    count a slab twice that goes from one place to another in between.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        stopped = Path(f"/proc/{pid}/stat")
        while stopped.read_text().rpartition(")")[2].split()[0] != "T":
            pass  # the signal is on its way
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    finally:
        os.kill(pid, signal.SIGCONT)
    total, inside = 0, False
    for line in lines:
        if "-" in line.split(" ", 1)[0]:
            inside = f"/memfd:{name}" in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
