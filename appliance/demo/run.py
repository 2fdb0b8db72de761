"""The demonstration: six models of five kinds served from memory for two, every token checked.

Makes the checkpoints, starts a daemon whose pools hold about a third of the weights, sends it a
burst of chats for all models at once, then runs the same chats on plain vLLM, and compares. What
the daemon tells during the burst is recorded for the dashboard.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from appliance.config.groups import devices_of, plan_instances
from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.recipes import DEMO, demo_models
from appliance.demo.session import recorded
from appliance.demo.traffic import ChatRequest, TimedAnswer, burst, send
from appliance.platform.admin_socket import AUTO
from appliance.platform.children import module_command
from appliance.platform.cpus import computes_four_bits
from appliance.units import human

CHATS_PER_MODEL: Final = 8
START_SECONDS: Final = 600
STOP_SECONDS: Final = 60
ANSWER_SECONDS: Final = 60
"""For one answer of a daemon on a busy machine."""
SESSION: Final = "session.jsonl"
PORTS: Final = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections by default."""


class Known(msgspec.Struct):
    """The prompt of a chat and what follows it on plain vLLM, in tokens."""

    prompt: list[int]
    tokens: list[int]


@dataclass(slots=True)
class Row:
    """A model in the table. Times are seconds."""

    model: str
    requests: int
    ttft_p50: float
    ttft_p99: float
    tbt_p50: float
    tbt_p99: float
    switches: int
    preemptions: int
    kv_swapped_bytes: int
    prefills: int
    identical: int


def main(*, keep: bool, directory: Path | None, instances: int, policy: str, as_json: bool) -> int:
    """Run the demonstration; returns the exit status, 0 if every output is identical."""
    console = Console(stderr=as_json)
    with ExitStack() as stack:
        place = directory or _directory(stack, keep)
        names = demo_models(four_bits=computes_four_bits())
        if names != DEMO:
            console.print(
                "this CPU lacks the instructions (avx512) for weights in 4 bits: a model in float32"
                " takes the place of the one that has them",
                soft_wrap=True,
            )
        console.print(f"making six checkpoints in {place}")
        make_checkpoints(place, names)
        file = write_config(
            place,
            names,
            instances=instances,
            policy=policy,
            bind=f"127.0.0.1:{free_port()}",
            short_turns=True,
        )
        config = load_config(file)
        chats = burst([model.name for model in config.models], CHATS_PER_MODEL)
        console.print("starting the daemon")
        with running_daemon(file, config, keep=keep) as (url, pid):
            _describe(console, config, url)
            session = _session(directory)
            answers, broken = asyncio.run(_send(console, url, chats, session))
            metrics = metrics_by_model(url)
            # Only now: the first token is what one waits for, and the daemon is idle meanwhile.
            console.print(f"running the same {len(chats)} chats on plain vLLM, to compare")
            rows = rows_by_model(config, answers, reference(config, chats), metrics)
            complaints = _complaints(rows, answers)
            _report(console, rows, complaints, as_json)
            if keep:
                console.print(f"\nthe daemon goes on at {url}; stop it with: kill {pid}")
                console.print(_curl(url, config), soft_wrap=True, highlight=False)
                console.print("the dashboard, live:")
                _print_line(console, f"{_program()} top --connect {url}")
            if broken is not None:
                _print_line(console, f"the session could not be recorded to its end: {broken}")
            else:
                console.print("the dashboard, on what has just happened (docs/tui.md has a tour):")
                _print_line(console, f"{_program()} top --replay {shlex.quote(str(session))}")
            if directory is not None:
                console.print("its models again, as any other directory with checkpoints:")
                _print_line(console, f"{_program()} serve {shlex.quote(str(directory))}")
    return 1 if complaints else 0


def _directory(stack: ExitStack, keep: bool) -> Path:
    """A temporary directory; it outlives the demonstration if the daemon does."""
    if keep:
        return Path(tempfile.mkdtemp(prefix="appliance-demo-"))
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="appliance-demo-")))


def _session(directory: Path | None) -> Path:
    """A file that is not there yet, and outlives the demonstration."""
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="appliance-demo-session-")) / SESSION
    session = directory / SESSION
    session.unlink(missing_ok=True)
    return session


def _program() -> str:
    """How this program was started: what is printed can be pasted."""
    called = Path(sys.argv[0])
    if called.name == "appliance":
        return shlex.quote(str(called))
    return f"{shlex.quote(sys.executable)} -m appliance"


def _print_line(console: Console, command: str) -> None:
    console.print(command, soft_wrap=True, highlight=False, markup=False)


def free_port() -> int:
    """A port that nothing uses. No outgoing connection takes it either, in the seconds until the
    daemon binds it."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def reference(config: Config, chats: Sequence[ChatRequest]) -> dict[ChatRequest, list[int]]:
    """The tokens of every chat on plain vLLM."""
    return {chat: answer.tokens for chat, answer in answered(config, chats).items()}


def answered(config: Config, chats: Sequence[ChatRequest]) -> dict[ChatRequest, Known]:
    """The prompt and the tokens of every chat on plain vLLM, one process for all models."""
    mine = {m.name: [chat for chat in chats if chat.model == m.name] for m in config.models}
    task = {
        "device": "cuda:0" if config.devices.cuda else "cpu",
        "checkpoints": [
            {
                "path": model.path,
                "max_context": model.max_context,
                "dtype": model.dtype,
                "tensor_parallel": devices_of(model, config.devices).tensor_parallel,
                "prompts": [
                    {"tokens": [], "max_tokens": chat.max_tokens, "chat": chat.prompt}
                    for chat in mine[model.name]
                ],
            }
            for model in config.models
        ],
    }
    done = subprocess.run(
        module_command("appliance.engines.vllm.reference"),
        input=msgspec.json.encode(task),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"plain vLLM failed:\n{done.stderr.decode(errors='replace')[-4000:]}")
    outputs = msgspec.json.decode(done.stdout, type=list[list[Known]])
    return {
        chat: answer
        for model, answers in zip(config.models, outputs, strict=True)
        for chat, answer in zip(mine[model.name], answers, strict=True)
    }


@contextmanager
def running_daemon(file: Path, config: Config, *, keep: bool = False) -> Iterator[tuple[str, int]]:
    """A running daemon with all instances up: its address and process id. It logs to
    ``daemon.log`` next to the configuration, and ends with the context unless it is to be kept."""
    url = f"http://{config.api.bind}"
    log = file.with_name("daemon.log")
    with log.open("wb") as stream:
        daemon = subprocess.Popen(
            module_command("appliance", "serve", "--config", str(file)),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=keep,
        )
    try:
        with _operator(config) as operator:
            _wait_until_ready(operator, daemon, log)
        yield url, daemon.pid
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            _end(daemon)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _operator(config: Config) -> httpx.Client:
    """A client that may ask everything: on the admin socket, if there is one."""
    path = config.api.admin_socket
    if path in ("", AUTO):
        return httpx.Client(base_url=f"http://{config.api.bind}", timeout=5)
    return httpx.Client(
        base_url="http://appliance", transport=httpx.HTTPTransport(uds=path), timeout=5
    )


def _wait_until_ready(operator: httpx.Client, daemon: subprocess.Popen[bytes], log: Path) -> None:
    """Until every instance is up (with fewer, the roles would not be the ones to show), and a front
    end is ready."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if daemon.poll() is not None:
            break
        try:
            status = operator.get("/api/status").raise_for_status().json()
            up = all(instance["state"] == "up" for instance in status["instances"])
            if up and operator.get("/readyz").is_success:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.1)
    raise SystemExit(f"the daemon did not get ready:\n{log.read_text(errors='replace')[-4000:]}")


def _describe(console: Console, config: Config, url: str) -> None:
    devices, instances = config.devices, len(plan_instances(config.devices))
    console.print(
        f"daemon at {url}: {len(config.models)} models, {instances} instance(s) of"
        f" {human(devices.memory_bytes)}, policy {', '.join(config.policy.use)}"
    )


async def _send(
    console: Console, url: str, chats: Sequence[ChatRequest], session: Path
) -> tuple[list[TimedAnswer], str | None]:
    """The answers, and why what happened meanwhile is not recorded, if that is so."""
    total = sum(chat.max_tokens for chat in chats)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"{len(chats)} chats at once", total=total)
        shown = 0
        waiting = True

        def on_token(answer: TimedAnswer) -> None:
            nonlocal shown, waiting
            if waiting and answer.tokens:
                waiting = False
                progress.print(f"first token: {answer.chat.model}, {answer.ttft_seconds:.1f} s")
            shown += 1
            progress.update(task, completed=shown)

        async with recorded(url, session) as recording:
            answers = await send(url, chats, on_token)
        return answers, recording.broken


def metrics_by_model(url: str) -> dict[tuple[str, str], float]:
    """(metric, model) -> value, summed over the other labels."""
    text = httpx.get(f"{url}/metrics", timeout=ANSWER_SECONDS).raise_for_status().text
    sums: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, sample.labels.get("model", ""))
            sums[key] = sums.get(key, 0.0) + sample.value
    return sums


def rows_by_model(
    config: Config,
    answers: Sequence[TimedAnswer],
    expected: dict[ChatRequest, list[int]],
    metrics: dict[tuple[str, str], float],
) -> list[Row]:
    """A row for each model: what its clients saw, and what the daemon counted."""
    rows = []
    for name in [model.name for model in config.models]:
        mine = [answer for answer in answers if answer.chat.model == name]
        gaps = [gap for answer in mine for gap in answer.gaps_seconds]
        ttfts = [answer.ttft_seconds for answer in mine]

        def count(metric: str, model: str = name) -> int:
            return int(metrics.get((metric, model), 0))

        rows.append(
            Row(
                model=name,
                requests=len(mine),
                ttft_p50=percentile(ttfts, 50),
                ttft_p99=percentile(ttfts, 99),
                tbt_p50=percentile(gaps, 50),
                tbt_p99=percentile(gaps, 99),
                switches=count("appliance_switches_total"),
                preemptions=count("appliance_preemptions_total"),
                kv_swapped_bytes=count("appliance_kv_swapped_bytes_total"),
                prefills=count("appliance_prefills_total"),
                identical=sum(answer.tokens == expected[answer.chat] for answer in mine),
            )
        )
    return rows


def percentile(values: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0.0


def _complaints(rows: Sequence[Row], answers: Sequence[TimedAnswer]) -> list[str]:
    """What is not as it has to be."""
    found = [f"{a.chat.model}: {a.error}" for a in answers if a.error is not None]
    for row in rows:
        if row.identical < row.requests:
            found.append(f"{row.model}: {row.requests - row.identical} outputs differ from vLLM's")
        if row.prefills != row.requests:
            found.append(f"{row.model}: {row.prefills} prefills for {row.requests} requests")
    return found


def _report(
    console: Console, rows: Sequence[Row], complaints: Sequence[str], as_json: bool
) -> None:
    if as_json:
        result = {"models": [msgspec.to_builtins(row) for row in rows], "complaints": complaints}
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
        return
    table = Table("model", title="what happened (TTFT and TBT: p50/p99)")
    for column in (
        "req", "TTFT s", "TBT ms", "switches", "preempted", "KV MB", "identical",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            str(row.requests),
            f"{row.ttft_p50:.1f}/{row.ttft_p99:.1f}",
            f"{row.tbt_p50 * 1000:.0f}/{row.tbt_p99 * 1000:.0f}",
            str(row.switches),
            str(row.preemptions),
            f"{row.kv_swapped_bytes / 1e6:.1f}",
            f"{row.identical}/{row.requests}",
        )
    console.print(table)
    for complaint in complaints:
        console.print(f"[red]{complaint}[/red]")
    total = sum(row.requests for row in rows)
    same = sum(row.identical for row in rows)
    preempted = sum(row.preemptions for row in rows)
    console.print(
        f"{same} of {total} outputs are token for token those of plain vLLM;"
        f" {preempted} preemptions in mid-generation, no preempted request was computed again"
        if not complaints
        else f"{same} of {total} outputs are identical"
    )


def _curl(url: str, config: Config) -> str:
    body = {
        "model": config.models[0].name,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 32,
    }
    return (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'"
        f" -d '{json.dumps(body)}'"
    )
