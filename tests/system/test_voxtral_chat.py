"""Chats with sound by a daemon that serves a small Voxtral: each text is plain vLLM's, which reads
the same weights in Mistral's own format."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import httpx

from appliance.config.loader import load_config
from appliance.demo.run import free_port, running_daemon
from tests.engine.with_voxtral import TOKENS, make_voxtral
from tests.frontend.sounds import file_of, tone
from tests.patience import PATIENCE_SECONDS

CONTEXT: Final = 1024
PLAIN: Final = """
import json, os, sys
from appliance.engines.vllm import prepare_environment
prepare_environment("auto")
from vllm import LLM, SamplingParams

task = json.load(sys.stdin)
answer = os.dup(1)
os.dup2(2, 1)
model = LLM(task["path"], dtype="float32", max_model_len=task["context"], enforce_eager=True,
            max_num_seqs=4, kv_cache_memory_bytes=64 << 20, limit_mm_per_prompt={"audio": 2},
            skip_mm_profiling=True)
greedy = SamplingParams(temperature=0.0, max_tokens=task["tokens"])
texts = [model.chat(messages, greedy, use_tqdm=False)[0].outputs[0].text
         for messages in task["chats"]]
os.write(answer, json.dumps(texts).encode())
os._exit(0)
"""


def heard(*seconds: float) -> list[dict[str, Any]]:
    """A chat with sounds as long as these."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "what is said"}]
    for each in seconds:
        data = base64.b64encode(file_of(tone(each), subtype="FLOAT")).decode()
        parts.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    return [{"role": "user", "content": parts}]


def test_texts_equal_plain_vllm(tmp_path: Path) -> None:
    path = make_voxtral(tmp_path)
    chats = [heard(), heard(2.0), heard(2.5), heard(30.0, 1.0)]
    asked = {"path": path, "context": CONTEXT, "tokens": 8, "chats": chats}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], input=json.dumps(asked).encode(), stdout=-1, check=True
    )
    expected: list[str] = json.loads(done.stdout)
    assert len(set(expected)) == len(expected), "the sound makes a difference"
    file = tmp_path / "appliance.toml"
    file.write_text(
        f'[api]\nbind = "127.0.0.1:{free_port()}"\nadmin_socket = ""\n'
        '[devices]\nkind = "cpu"\nslab = "256KiB"\nmemory = "24MiB"\nhost_cache = "96MiB"\n'
        f'[[model]]\nname = "hearer"\npath = "{path}"\ndtype = "float32"\n'
        f"max_context = {CONTEXT}\nsounds = 2\n"
    )
    with running_daemon(file, load_config(file)) as (url, _):
        said = [answered(url, chat) for chat in chats]
    assert [one["choices"][0]["message"]["content"] for one in said] == expected
    tokens = [one["usage"]["prompt_tokens"] for one in said]
    assert [n - tokens[0] for n in tokens] == [n * (TOKENS + 1) for n in (0, 1, 1, 2)]


def answered(url: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "hearer", "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found
