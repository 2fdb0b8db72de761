"""Three small models that a front end can be asked for, and what a stand-in core answers them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from vllm.v1.engine import EngineCoreOutput, FinishReason

from appliance.demo.checkpoints import train_tokenizer
from appliance.demo.recipes import EOS_ID
from appliance.engines.vllm.messages import encode_output
from appliance.service.front_frames import FrontModel, Submit
from appliance.vocabulary import Task
from tests.conftest import CHECKPOINT_CONFIG
from tests.frontend.stand_in_core import StandInCore, made_up

_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CONTEXT = 512


def small_models(folder: Path) -> list[FrontModel]:
    """``small`` generates, ``embedder`` embeds, ``scorer`` scores: checkpoints without weights."""
    words = train_tokenizer()
    found = []
    for name, task in (("small", Task.GENERATE), ("embedder", Task.EMBED), ("scorer", Task.SCORE)):
        path = folder / name
        path.mkdir()
        config: dict[str, Any] = CHECKPOINT_CONFIG | {
            "model_type": "llama",
            "vocab_size": words.get_vocab_size(),
            "intermediate_size": 64,
            "hidden_act": "silu",
            "eos_token_id": EOS_ID,
            "pad_token_id": 0,
        }
        if task is Task.SCORE:
            config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        words.save(str(path / "tokenizer.json"))
        described = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|eos|>",
            "chat_template": _TEMPLATE,
        }
        (path / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
        found.append(
            FrontModel(
                name=name,
                path=str(path),
                dtype="float32",
                max_context=_CONTEXT,
                max_batch=8,
                task=task,
                created=1_700_000_000,
                tool_parser="hermes" if task is Task.GENERATE else None,
            )
        )
    return found


def answer(core: StandInCore) -> None:
    """Have `core` answer: five tokens, a vector, or a score."""
    core.saying = lambda submit: made_up(submit.prompt, min(submit.max_tokens, 5))
    core.details = _details


def _details(submit: Submit, tokens: list[int]) -> list[bytes]:
    if submit.max_tokens:
        return []
    pooled = torch.tensor([0.6, 0.8] if submit.model == "embedder" else [0.75])
    output = EngineCoreOutput(
        request_id=submit.request,
        new_token_ids=[],
        pooling_output=pooled,
        finish_reason=FinishReason.STOP,
    )
    return [encode_output(output)]
