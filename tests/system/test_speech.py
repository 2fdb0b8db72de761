"""Transcriptions by a daemon: each text is plain vLLM's, also that of a long sound, which is
divided."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import httpx

from appliance.config.loader import load_config
from appliance.demo.run import free_port, running_daemon
from tests.engine.with_sound import make_with_sound
from tests.frontend.sounds import CONTEXT, file_of, save_words, tone
from tests.patience import PATIENCE_SECONDS

TOKENS: Final = 8
SECONDS: Final = (2.0, 40.0)
"""Of the sounds; the second has two parts."""
PLAIN: Final = """
import json, os, sys
from appliance.engines.vllm import prepare_environment
prepare_environment("auto")
from vllm import LLM, SamplingParams
from vllm.multimodal.audio import split_audio
from tests.frontend.sounds import RATE, tone

task = json.load(sys.stdin)
answer = os.dup(1)
os.dup2(2, 1)
model = LLM(task["path"], dtype="float32", max_model_len=task["context"], enforce_eager=True,
            max_num_seqs=8, kv_cache_memory_bytes=64 << 20, limit_mm_per_prompt={"audio": 1})
start = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
greedy = SamplingParams(temperature=0.0, max_tokens=task["tokens"])
texts = []
for seconds in task["seconds"]:
    samples = tone(seconds)
    parts = split_audio(samples, RATE, 30, 1, 1600) if seconds > 30 else [samples]
    made = [
        model.generate({
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (part, RATE)}},
            "decoder_prompt": {"prompt": start},
        }, greedy, use_tqdm=False)[0].outputs[0].text
        for part in parts
    ]
    texts.append(" ".join(made))
os.write(answer, json.dumps(texts).encode())
os._exit(0)
"""


def test_texts_equal_plain_vllm(tmp_path: Path) -> None:
    whisper = make_with_sound(tmp_path)
    save_words(Path(whisper))
    expected = plain(whisper)
    file = tmp_path / "appliance.toml"
    file.write_text(
        f'[api]\nbind = "127.0.0.1:{free_port()}"\nadmin_socket = ""\n'
        '[devices]\nkind = "cpu"\nslab = "256KiB"\nmemory = "24MiB"\nhost_cache = "96MiB"\n'
        f'[[model]]\nname = "whisper"\npath = "{whisper}"\ndtype = "float32"\n'
        f"max_context = {CONTEXT}\n"
    )
    with running_daemon(file, load_config(file)) as (url, _):
        said = [transcribed(url, seconds) for seconds in SECONDS]
        streamed = transcribed(url, SECONDS[1], stream="true")
        models_shown = httpx.get(f"{url}/v1/models", timeout=PATIENCE_SECONDS).json()["data"]
    assert [one.json()["text"] for one in said] == expected
    assert len(set(expected)) == len(expected), "the sound makes a difference"
    events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(one)["choices"][0]["delta"]["content"] for one in events]
    assert "".join(deltas) == expected[1]
    assert {one["id"]: one["task"] for one in models_shown}["whisper"] == "transcription"


def transcribed(url: str, seconds: float, **fields: str) -> httpx.Response:
    data = {"model": "whisper", "language": "en", "max_completion_tokens": str(TOKENS)} | fields
    files = {"file": ("said.wav", file_of(tone(seconds), subtype="FLOAT"))}
    answer = httpx.post(
        f"{url}/v1/audio/transcriptions", data=data, files=files, timeout=PATIENCE_SECONDS
    )
    assert answer.status_code == 200, answer.text
    return answer


def plain(path: str) -> list[str]:
    """The texts that plain vLLM makes."""
    task: dict[str, Any] = {
        "path": path,
        "context": CONTEXT,
        "tokens": TOKENS,
        "seconds": SECONDS,
    }
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], input=json.dumps(task).encode(), stdout=-1, check=True
    )
    texts: list[str] = json.loads(done.stdout)
    return texts
