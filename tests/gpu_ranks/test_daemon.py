"""A daemon with two groups of four ranks on eight pretend GPUs, and three models in each group.

Tokens mean nothing on the pretend driver. What is asserted: requests are answered, in turns for
which weights leave the pool and come back; all ranks launch graphs; a killed rank's instance comes
back with its requests, while the other group answers; and the driver has seen no fault.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.run import free_port, running_daemon
from tests.gpu_ranks.test_ranks import is_follower

RANKS = 4
GROUPS = ("left", "right")
CHECKPOINTS = ["llama-a", "qwen3-a", "mixtral-a"]
NEVER_SECONDS = 600
"""Eight ranks start on as few processors as the machine has."""
CHATS = "/v1/chat/completions"
TOKENS = 6
LONG_TOKENS = 300
"""Of a request that is under way when a rank is killed."""
RUNTIME_MIB = 1408
POOL_MIB = 8
"""Of each rank: it has no room for its shards of three models."""


def test_two_groups_of_ranks_serve_and_a_killed_rank_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.environ.get("PRETEND") != "1":
        pytest.fail("this is for the pretend driver: run `make gpu-dry`")
    monkeypatch.setenv("PRETEND_DEVICES", str(RANKS * len(GROUPS)))
    notes = {name: tmp_path / name.lower() for name in ("AUDIT", "COMMUNICATORS", "GRAPHS")}
    for name, path in notes.items():
        monkeypatch.setenv(f"PRETEND_{name}", str(path))

    with served(configured(tmp_path)) as client:
        all_answered(client, *GROUPS)
        loaded = [one["moved_bytes"]["weights"] for one in instances(client)]
        all_answered(client, *GROUPS)
        before = instances(client)
        assert [(one["group"], one["ranks"]) for one in before] == [(g, RANKS) for g in GROUPS]
        again = [one["moved_bytes"]["weights"] for one in before]
        assert all(now > then for now, then in zip(again, loaded, strict=True)), (loaded, again)
        members = [family(one["pid"]) for one in before]
        assert [len(one) for one in members] == [RANKS] * len(GROUPS)
        launched = launches(notes["GRAPHS"])
        assert all(launched.get(pid, 0) >= len(CHECKPOINTS) for one in members for pid in one)

        with client.stream("POST", CHATS, json=body(f"left-{CHECKPOINTS[0]}", LONG_TOKENS)) as long:
            lines = long.iter_lines()
            while '"token_ids"' not in next(lines):
                pass  # until its first token is there
            os.kill(members[0][-1], signal.SIGKILL)
            all_answered(client, "right")
            all_answered(client, "left")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert any(f'"completion_tokens":{LONG_TOKENS}}}' in line for line in rest), rest[-3:]

        after = instances(client)
        assert after[0]["pid"] != members[0][0], "the instance of the killed rank is another one"
        assert after[1]["pid"] == members[1][0], "the other group was not started again"
        anew = family(after[0]["pid"])
        launched = launches(notes["GRAPHS"])
        assert len(anew) == RANKS
        assert all(launched.get(pid, 0) >= len(CHECKPOINTS) for pid in anew)

    faults = notes["AUDIT"]
    assert not faults.exists(), faults.read_text()
    # vLLM makes two communicators with its groups; the left instance was started twice.
    assert len(notes["COMMUNICATORS"].read_text().splitlines()) == 3 * 2 * RANKS


def configured(folder: Path) -> Path:
    """Each group has each checkpoint under a name of its own."""
    make_checkpoints(folder, CHECKPOINTS)
    path = write_config(
        folder,
        [],
        bind=f"127.0.0.1:{free_port()}",
        kind="cuda",
        instances=1,
        memory=f"{RUNTIME_MIB + POOL_MIB}MiB",
        runtime=f"{RUNTIME_MIB}MiB",
        slab="2MiB",
        host_cache="512MiB",
        dtype="bfloat16",
    )
    text = path.read_text().replace("instances = 1\n", "")
    for group in GROUPS:
        text += f'\n[[devices.group]]\nname = "{group}"\ntensor_parallel = {RANKS}\n'
    for group in GROUPS:
        for name in CHECKPOINTS:
            text += f'\n[[model]]\nname = "{group}-{name}"\npath = {str(folder / name)!r}\n'
            text += f'max_context = 512\ndtype = "bfloat16"\ngroups = ["{group}"]\n'
    path.write_text(text)
    return path


@contextmanager
def served(file: Path) -> Iterator[httpx.Client]:
    try:
        with running_daemon(file, load_config(file)) as (url, _):
            yield httpx.Client(base_url=url, timeout=NEVER_SECONDS)
    finally:
        if kept := os.environ.get("OUT"):
            shutil.copy(file.with_name("daemon.log"), Path(kept, "daemon-groups.log"))


def body(model: str, tokens: int) -> dict[str, Any]:
    """A streamed chat that says at its end how many tokens it had."""
    asked = {"model": model, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    asked["messages"] = [{"role": "user", "content": "hello there"}]
    return asked | {"stream_options": {"include_usage": True}}


def answered(client: httpx.Client, model: str) -> None:
    answer = client.post(CHATS, json=body(model, TOKENS))
    assert answer.status_code == httpx.codes.OK, answer.text
    assert f'"completion_tokens":{TOKENS}}}' in answer.text, answer.text


def all_answered(client: httpx.Client, *groups: str) -> None:
    for name in CHECKPOINTS:
        for group in groups:
            answered(client, f"{group}-{name}")


def instances(client: httpx.Client) -> list[dict[str, Any]]:
    return list(client.get("/api/status").raise_for_status().json()["instances"])


def family(leader: int) -> list[int]:
    """The processes of an instance, its leader first."""
    children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
    return [leader, *(int(pid) for pid in children if is_follower(int(pid)))]


def launches(file: Path) -> dict[int, int]:
    """How many graphs a process has launched, by its id."""
    counts: dict[int, int] = {}
    for line in file.read_text().splitlines():
        pid = int(line.partition("\t")[0])
        counts[pid] = counts.get(pid, 0) + 1
    return counts
