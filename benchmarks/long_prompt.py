"""How much later short chats get their first token beside a prompt of 30,000 tokens.

    python -m benchmarks.long_prompt [--pairs 3] [--json F]

A real daemon with two instances on the CPU, one small model; 20 chats of some 100 + 50 tokens, one
each half second. In every second run a prompt of 30,000 tokens is sent a second before the first
chat, and cancelled after the last. Of 20 chats the slowest is the 99th percentile. Nothing else
should run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.recipes import RECIPES
from appliance.demo.run import free_port, running_daemon
from appliance.demo.traffic import ChatRequest, TimedAnswer, send
from benchmarks.provenance import made_on_cpu

CHATS: Final = 20
BETWEEN_SECONDS: Final = 0.5
LONG_TOKENS: Final = 30_000
MAX_CONTEXT: Final = 32_768
MODEL: Final = RECIPES[0].name


def main() -> int:
    options = _options()
    runs: dict[str, list[list[float]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory(prefix="appliance-long-prompt-") as directory:
        place = Path(directory)
        make_checkpoints(place, [MODEL])
        _allow_long_prompts(place / MODEL)
        for _ in range(options.pairs):
            for name in runs:
                runs[name].append(_run(_write(place), long=name == "with"))
                print(name, [round(seconds, 3) for seconds in runs[name][-1]], flush=True)
    worst = {name: statistics.median(map(max, made)) for name, made in runs.items()}
    result = {
        "benchmark": "long_prompt",
        **made_on_cpu(),
        "chats": CHATS,
        "long_tokens": LONG_TOKENS,
        "ttft_p99_seconds": worst,
        "ratio": worst["with"] / worst["without"],
        "ttft_seconds": runs,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("ttft_p99_seconds", "ratio")}))
    return 0


def _allow_long_prompts(checkpoint: Path) -> None:
    """A model without learned positions takes as many as its configuration says."""
    file = checkpoint / "config.json"
    described = json.loads(file.read_text())
    file.write_text(json.dumps(described | {"max_position_embeddings": MAX_CONTEXT}))


def _write(place: Path) -> Path:
    return write_config(
        place,
        [MODEL],
        bind=f"127.0.0.1:{free_port()}",
        instances=2,
        memory="1GiB",
        host_cache="1GiB",
        max_context=MAX_CONTEXT,
    )


def _run(file: Path, *, long: bool) -> list[float]:
    """Seconds until the first token of each chat."""
    with running_daemon(file, load_config(file)) as (url, _):
        warm = [ChatRequest(MODEL, f"{number} Hello", 8) for number in range(4)]
        asyncio.run(send(url, warm, lambda _: None))
        return asyncio.run(_chat(url, long=long))


async def _chat(url: str, *, long: bool) -> list[float]:
    other = asyncio.create_task(send(url, [_long_prompt()] if long else [], lambda _: None))
    await asyncio.sleep(1)
    chats = [asyncio.create_task(_one(url, number)) for number in range(CHATS)]
    answers = await asyncio.gather(*chats)
    if long and other.done():
        raise SystemExit("the long prompt was over before the chats: it has to be longer")
    other.cancel()
    with suppress(asyncio.CancelledError):
        await other
    return [answer.ttft_seconds for answer in answers]


async def _one(url: str, number: int) -> TimedAnswer:
    await asyncio.sleep(number * BETWEEN_SECONDS)
    text = f"{number}: " + "Tell me about the frozen river, as before. " * 6
    (answer,) = await send(url, [ChatRequest(MODEL, text, 50, ignore_eos=True)], lambda _: None)
    if answer.error is not None:
        raise SystemExit(answer.error)
    return answer


def _long_prompt() -> ChatRequest:
    """Each word is a token."""
    return ChatRequest(MODEL, "a river " * (LONG_TOKENS // 2), 50, ignore_eos=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
