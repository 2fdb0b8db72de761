"""Embedders and rerankers whose tokens attend in both directions, next to a model that generates,
in a pool that does not hold them all: texts in, and plain vLLM's vectors and scores out."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from appliance.config.loader import load_config
from appliance.demo.run import running_daemon
from tests.configs import CONFIGS
from tests.engine.pooled import write_modules
from tests.engine.published_encoders import make_published
from tests.engine.shrunken import make_shrunken
from tests.patience import PATIENCE_SECONDS
from tests.system.test_kinds import configure

EMBEDDER, CROSS, RERANKER, CHAT = (
    "all-minilm-l6-v2",
    "ms-marco-minilm-l6-v2",
    "gte-multilingual-reranker-base",
    "llama-3.2-1b",
)
CONTEXT = 128
POOL = "6MiB"
"""They do not all fit."""
QUERY = "What flows through Rome?"
TEXTS = [
    "The Tiber.",
    "A river, which is LONG, and flows through Rome.",
    "Nothing at all, " * 5,
    "Ponte Milvio",
]
CHATS, TOKENS = 4, 40
PLAIN = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM prints; answers have a channel of their own
from vllm import LLM
from appliance.checkpoints.overrides import language_config
from appliance.engines.vllm.configs.types import register_types
register_types()
embedder, *scorers, query, texts = json.load(sys.stdin)
options = {"runner": "pooling", "dtype": "float32", "enforce_eager": True, "max_model_len": 128}
options["hf_overrides"] = language_config
llms = [LLM(path, **options) for path in (embedder, *scorers)]
vectors = [output.outputs.embedding for output in llms[0].embed(texts, use_tqdm=False)]
scores = [[o.outputs.score for o in llm.score(query, texts, use_tqdm=False)] for llm in llms[1:]]
print(json.dumps([vectors, *scores]), file=answers, flush=True)
os._exit(0)
"""


def save_wordpiece(folder: Path) -> None:
    """The kind of tokenizer that BERT has: in it, the tokens of a second text have another type."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    letters = [chr(code) for code in range(33, 127)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    encoder = Tokenizer(
        models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    encoder.normalizer = normalizers.BertNormalizer(lowercase=False)
    encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    encoder.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=encoder,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)


def make(folder: Path) -> dict[str, str]:
    """Paths of the models. The embedder takes means, of texts in small letters; the reranker's
    files name code of their own, which is not there."""
    names = (EMBEDDER, CROSS, CHAT)
    paths = {name: make_shrunken(folder, name, CONFIGS[name]) for name in names}
    paths[RERANKER] = make_published(folder, RERANKER, CONFIGS[RERANKER]).path
    for name in (EMBEDDER, CROSS):
        save_wordpiece(Path(paths[name]))
    embedder = Path(paths[EMBEDDER])
    write_modules(embedder, "mean_tokens")
    (embedder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": CONTEXT, "do_lower_case": True})
    )
    return paths


def plain(paths: dict[str, str]) -> list[Any]:
    """Vectors of the texts, and their scores by each of the scorers."""
    done = subprocess.run(
        [sys.executable, "-c", PLAIN],
        input=json.dumps([paths[EMBEDDER], paths[CROSS], paths[RERANKER], QUERY, TEXTS]),
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[Any] = json.loads(done.stdout)
    return found


async def ask(url: str) -> list[list[Any]]:
    """The outcomes of several rounds, in the form of `plain`, while chats go on; before the second
    round the worker is killed."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:

        async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        async def chat() -> None:
            body = {"model": CHAT, "prompt": QUERY, "max_tokens": TOKENS, "ignore_eos": True}
            assert (await post("/v1/completions", body))["usage"]["completion_tokens"] == TOKENS

        async def outcomes() -> list[Any]:
            scoring = {"text_1": QUERY, "text_2": TEXTS}
            embedded, *scored = await asyncio.gather(
                post("/v1/embeddings", {"model": EMBEDDER, "input": TEXTS}),
                post("/score", {"model": CROSS, **scoring}),
                post("/score", {"model": RERANKER, **scoring}),
            )
            vectors = [one["embedding"] for one in embedded["data"]]
            return [vectors, *([one["score"] for one in scores["data"]] for scores in scored)]

        chats = [asyncio.create_task(chat()) for _ in range(CHATS)]
        rounds = [await outcomes()]
        status = (await client.get("/api/status")).json()
        os.kill(status["instances"][0]["pid"], signal.SIGKILL)
        for _ in range(2):
            rounds.append(await outcomes())
        await asyncio.gather(*chats)
        return rounds


def test_outcomes_equal_plain_vllm(tmp_path: Path) -> None:
    paths = make(tmp_path)
    expected = plain(paths)
    file = configure(tmp_path, paths, f'memory = "{POOL}"\nhost_cache = "32MiB"\n', context=CONTEXT)
    with running_daemon(file, load_config(file)) as (url, _):
        rounds = asyncio.run(ask(url))
        ranked = httpx.post(
            f"{url}/v1/rerank",
            json={"model": CROSS, "query": QUERY, "documents": TEXTS},
            timeout=PATIENCE_SECONDS,
        ).json()
        shown = httpx.get(f"{url}/api/models/{EMBEDDER}", timeout=PATIENCE_SECONDS).json()

    for found in rounds:
        for outcome, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(outcome, wanted, rtol=1e-3, atol=1e-5)
    assert [one["index"] for one in ranked["results"]] == sorted(
        range(len(TEXTS)), key=lambda index: -expected[1][index]
    )
    assert len({round(score, 5) for score in expected[1]}) == len(TEXTS)
    assert shown["facts"]["kv_bytes_per_token"] == 0
    log = (tmp_path / "daemon.log").read_text(errors="replace")
    assert not re.search(r"Traceback", log)
