"""Checkpoints whose tokenizer is no `tokenizer.json`: read from whatever vLLM makes one of."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.frontend.conftest import model_at
from tests.frontend.stand_in_core import front_end
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
TEXT = "the river flows through Rome, and the Tiber is a river of Rome: größer"


def sentencepiece_model(path: Path) -> None:
    """As Llama 2 has it: pieces with bytes for what no piece has."""
    import sentencepiece

    (path / "text").write_text("\n".join([TEXT] * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(path / "text"),
        model_prefix=str(path / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    written = {"tokenizer_class": "LlamaTokenizer", "chat_template": TEMPLATE, "legacy": False}
    (path / "tokenizer_config.json").write_text(json.dumps(written), encoding="utf-8")


def vocabulary_and_merges(path: Path) -> None:
    """As GPT-2 has it."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    vocabulary = {letter: index for index, letter in enumerate([*letters, "th", "the"])}
    (path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n", encoding="utf-8")
    written = {
        "tokenizer_class": "GPT2Tokenizer",
        "chat_template": TEMPLATE,
        "unk_token": "!",
        "bos_token": "!",
        "eos_token": "!",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(written), encoding="utf-8")


def tekken(path: Path) -> None:
    """As Mistral's newer models have it: mistral_common's own file, which has the template."""
    described = {
        "config": {
            "pattern": r"\w+|[^\w\s]+|\s+",
            "num_vocab_tokens": 260,
            "default_vocab_size": 300,
            "default_num_special_tokens": 40,
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(
                [*(bytes([byte]) for byte in range(256)), b"th", b"he", b"in", b"er"]
            )
        ],
    }
    (path / "tekken.json").write_text(json.dumps(described), encoding="utf-8")
    config = json.loads((path / "config.json").read_bytes())
    # What Mistral's repositories have beside it, and vLLM knows them by.
    (path / "params.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "consolidated.safetensors").touch()


@pytest.mark.parametrize("write", [sentencepiece_model, vocabulary_and_merges, tekken])
async def test_a_chat_is_tokenized_and_answered(
    generator: Path, tmp_path: Path, write: Callable[[Path], None]
) -> None:
    from vllm.tokenizers import get_tokenizer

    path = tmp_path / "model"
    path.mkdir()
    shutil.copyfile(generator / "config.json", path / "config.json")
    write(path)
    expected = get_tokenizer(str(path)).encode(TEXT)
    async with front_end([model_at(path, "m")]) as core:
        core.saying = lambda submit: [70, 71, 72]
        async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as http:
            found = await http.post("/tokenize", json={"model": "m", "prompt": TEXT})
            assert found.json()["tokens"] == expected
            back = await http.post("/detokenize", json={"model": "m", "tokens": expected})
            assert TEXT in back.json()["prompt"]
            answer = await http.post(
                "/v1/chat/completions",
                json={"model": "m", "messages": [{"role": "user", "content": TEXT}]},
            )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] > len(expected)
    assert answer.json()["choices"][0]["message"]["content"]
