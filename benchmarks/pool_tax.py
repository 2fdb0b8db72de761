"""What the pool costs one model that is alone: decode throughput of the daemon over plain vLLM's.

    python benchmarks/pool_tax.py [--model llama-1k] [--batch 16] [--tokens 100] [--pairs 7]

Both run the same checkpoint with the same engine arguments on the same processor, in turns, within
one run: the daemon with a client that streams over HTTP, vLLM in-process with `LLMEngine.step`.
Throughput counts the tokens that come between the moment when every request has its first and the
moment when the first request ends. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.recipes import RECIPES, Recipe
from appliance.demo.run import free_port, running_daemon
from appliance.demo.traffic import ChatRequest
from appliance.serve import share_cpus

LARGER = Recipe(
    name="llama-1k",
    family="llama",
    layers=6,
    hidden=1024,
    intermediate=2816,
    heads=16,
    kv_heads=4,
    head_dim=64,
    seed=99,
)
"""A quarter of a gigabyte in float32: its layers are the size of a real model's."""

MAX_CONTEXT = 512
MAX_BATCH = 32


class Window:
    """Counts tokens while a full batch decodes."""

    def __init__(self, batch: int) -> None:
        self._waiting = batch
        self._began: float | None = None
        self._ended: float | None = None
        self._tokens = 0

    def first(self) -> None:
        """A request got its first token."""
        self._waiting -= 1
        if not self._waiting:
            self._began = time.perf_counter()

    def tokens(self, count: int) -> None:
        if self._began is not None and self._ended is None:
            self._tokens += count

    def last(self) -> None:
        """A request ended."""
        if self._ended is None:
            self._ended = time.perf_counter()

    def throughput(self) -> float:
        """Tokens per second."""
        assert self._began is not None
        assert self._ended is not None
        return self._tokens / (self._ended - self._began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=LARGER.name)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.batch > MAX_BATCH:
        parser.error(f"--batch: at most {MAX_BATCH}, the daemon's default")
    if options.plain:
        serve_plain(options.plain, options)
        return
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoints(Path(directory), [options.model], [*RECIPES, LARGER])
        pairs = measure(Path(directory), options)
    ratios = [ours / plain for ours, plain in pairs]
    result = {
        "what": "decode throughput, daemon / plain vLLM",
        "model": options.model,
        "dtype": options.dtype,
        "batch": options.batch,
        "cpus": os.cpu_count(),
        "daemon_tokens_per_second": statistics.median(ours for ours, _ in pairs),
        "plain_tokens_per_second": statistics.median(plain for _, plain in pairs),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "pairs": len(pairs),
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(directory: Path, options: argparse.Namespace) -> list[tuple[float, float]]:
    """(daemon, plain) tokens per second, in turns; the first pair warms up and is left out."""
    file = write_config(
        directory,
        [options.model],
        bind=f"127.0.0.1:{free_port()}",
        instances=1,
        memory="512MiB",
        host_cache="1GiB",
        slab="2MiB",
        max_context=MAX_CONTEXT,
        dtype=options.dtype,
    )
    plain = subprocess.Popen(
        [sys.executable, __file__, "--plain", str(directory / options.model), *sys.argv[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert plain.stdin is not None
    assert plain.stdout is not None
    pairs = []
    with plain, running_daemon(file, load_config(file)) as (url, _):
        # The client shares the daemon's processor; the worker and plain vLLM have the others.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
        for number in range(options.pairs + 1):
            ours = asyncio.run(through_daemon(url, options))
            plain.stdin.write("go\n")
            plain.stdin.flush()
            answer = plain.stdout.readline()
            if not answer:
                raise SystemExit("plain vLLM ended early")
            theirs = float(answer)
            print(f"{number}: daemon {ours:.0f}, plain {theirs:.0f} tokens/s", file=sys.stderr)
            pairs.append((ours, theirs))
        plain.stdin.close()
    return pairs[1:]


def chats_of(options: argparse.Namespace) -> list[ChatRequest]:
    """The same prompts for both."""
    return [
        ChatRequest(options.model, f"Number {number}, please", options.tokens, ignore_eos=True)
        for number in range(options.batch)
    ]


async def through_daemon(url: str, options: argparse.Namespace) -> float:
    window = Window(options.batch)
    await asyncio.gather(*(stream(url, chat, window) for chat in chats_of(options)))
    return window.throughput()


class Event(msgspec.Struct):
    """What matters here of a chunk."""

    class Choice(msgspec.Struct):
        finish_reason: str | None = None
        token_ids: list[int] = []

    choices: list[Choice] = []


async def stream(url: str, chat: ChatRequest, window: Window) -> None:
    """One chat on a connection of its own, read with as little work as can be: the client shares
    the machine with what is measured."""
    host, port = url.removeprefix("http://").split(":")
    body = msgspec.json.encode(
        {
            "model": chat.model,
            "messages": [{"role": "user", "content": chat.prompt}],
            "max_tokens": chat.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
    )
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}"
    head += "\r\ncontent-type: application/json"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    decode = msgspec.json.Decoder(Event).decode
    count = 0
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        for choice in decode(line[6:]).choices:
            window.tokens(len(choice.token_ids))
            if choice.token_ids and not count:
                window.first()
            count += len(choice.token_ids)
            if choice.finish_reason:
                window.last()
                assert count == chat.max_tokens
                writer.close()
                return


def serve_plain(path: str, options: argparse.Namespace) -> None:
    """Plain vLLM in this process: a throughput for every line read."""
    from appliance.engines.vllm.environment import prepare_environment

    # What the only instance of a daemon gets.
    prepare_environment(share_cpus(sorted(os.sched_getaffinity(0)), [1])[0])
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.tokenizers import get_tokenizer

    llm = LLM(
        path,
        dtype=options.dtype,
        max_model_len=MAX_CONTEXT,
        max_num_seqs=MAX_BATCH,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=192 << 20,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=options.tokens, ignore_eos=True, detokenize=False
    )
    engine = llm.llm_engine
    tokenizer = get_tokenizer(path)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": chat.prompt}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for chat in chats_of(options)
    ]
    for turn, _ in enumerate(sys.stdin):
        window = Window(options.batch)
        lengths: dict[str, int] = {}
        for number, prompt in enumerate(prompts):
            engine.add_request(f"{turn}-{number}", TokensPrompt(prompt_token_ids=prompt), params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                length = len(output.outputs[0].token_ids)
                before = lengths.get(output.request_id, 0)
                lengths[output.request_id] = length
                window.tokens(length - before)
                if not before and length:
                    window.first()
                if output.finished:
                    window.last()
        answer.write(f"{window.throughput()}\n")
        answer.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
