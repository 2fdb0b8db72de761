"""Makes small checkpoints of encoders whose published files come with code of their own: with their
keys and the names of their tensors, which are not those that transformers has for the same model.

What transformers' own classes make of the same weights is the reference.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from tests.engine.house import save_tokenizer
from tests.engine.pooled import write_modules
from tests.engine.shrunken import EXPERTS, HEAD_DIM, HEADS, HIDDEN, LAYERS, VOCAB, shrunken

_FLASH: Final = (
    (r"embeddings\.LayerNorm", "emb_ln"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"attention\.output\.dense", "mixer.out_proj"),
    (r"attention\.output\.LayerNorm", "norm1"),
    (r"intermediate\.dense", "mlp.fc1"),
    (r"output\.dense", "mlp.fc2"),
    (r"output\.LayerNorm", "norm2"),
    (r"attention\.self\.(query|key|value)", "mixer.Wqkv"),
)
RENAMED: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "gte-base-en-v1.5": (),
    "gte-multilingual-base": ((r"^", "new."), (r"^new.classifier", "classifier")),
    "gte-multilingual-reranker-base": ((r"^gte\.", "new."),),
    "jina-embeddings-v3": ((r"^", "roberta."),),
    "jina-reranker-v2-base-multilingual": _FLASH,
    "nomic-embed-text-v1.5": (),
    "nomic-embed-text-v2-moe": ((r"\.mixer\.", ".attn."),),
    "snowflake-arctic-embed-m-v2.0": (),
}
"""By model, what its files call otherwise than transformers writes it: patterns and replacements.
Tensors that get the same name are joined."""


class PublishedEncoder(NamedTuple):
    """A small checkpoint, and transformers' model with its weights."""

    path: str
    model: nn.Module
    mean: bool
    """Whether it pools by the mean instead of the first token."""
    tasks: Mapping[str, nn.Module] = {}
    """Of a checkpoint with adapters of tasks: by task, the same with its adapter added."""

    def pooled(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """The vector of each prompt, or its score."""
        return self._pooled(self.model, prompts)

    def pooled_for(self, task: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """The same with the adapter of a task."""
        return self._pooled(self.tasks[task], prompts)

    def _pooled(self, model: nn.Module, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        found = []
        for prompt in prompts:
            tokens = torch.tensor([prompt])
            with torch.no_grad():
                out = model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
            if "logits" in out:
                found.append(torch.sigmoid(out.logits[0]).tolist())
                continue
            states = out.last_hidden_state[0]
            pooled = states.mean(dim=0) if self.mean else states[0]
            found.append(nn.functional.normalize(pooled, dim=0).tolist())
        return found


def make_published(folder: Path, name: str, config: dict[str, Any]) -> PublishedEncoder:
    """Write one: `config` is that of the large model."""
    from safetensors.torch import load_file, save_file

    small = shrunken(config) | {"auto_map": config["auto_map"]}
    if "n_inner" in small:
        small["n_inner"] = 2 * HIDDEN
    torch.manual_seed(sum(name.encode()))
    model = _model(small).eval()
    with torch.no_grad():
        for weight, values in model.named_parameters():
            middle = 1.0 if "norm" in weight.lower() and values.dim() == 1 else 0.0
            values.normal_(middle, 0.2 if values.dim() > 1 else 0.05)
    path = folder / name
    model.save_pretrained(path)
    file = path / "model.safetensors"
    tensors: dict[str, list[torch.Tensor]] = {}
    for written, tensor in sorted(load_file(file).items(), key=lambda item: _rank(item[0])):
        for pattern, replacement in RENAMED[name]:
            written = re.sub(pattern, replacement, written)
        tensors.setdefault(written, []).append(tensor)
    if name == "gte-multilingual-base":  # scores of words, which no vector needs
        tensors["classifier.weight"] = [torch.ones(1, HIDDEN)]
        tensors["new.pooler.dense.bias"] = [torch.ones(HIDDEN)]
    joined = {written: torch.cat(found) for written, found in tensors.items()}
    tasks = _add_adapters(path, small, joined) if "lora_adaptations" in small else {}
    save_file(joined, file, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(small))
    save_tokenizer(path)
    mean = small["model_type"] == "nomic_bert" or bool(tasks)
    if mean:
        write_modules(path, "mean_tokens")
    return PublishedEncoder(str(path), tasks.get(next(reversed(tasks), ""), model), mean, tasks)


def _add_adapters(
    path: Path, small: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> dict[str, nn.Module]:
    """Give each matrix an adapter of each task, as Jina's files have them; transformers' models
    with the sums, which Jina's code computes so (`modeling_lora.py`), by task."""
    import transformers
    from safetensors.torch import save_file

    tasks, rank, scale = small["lora_adaptations"], small["lora_rank"], small["lora_alpha"]
    sums = [dict(tensors) for _ in tasks]
    for name, matrix in [(name, t) for name, t in tensors.items() if t.dim() == 2]:
        rows, columns = matrix.shape
        first, second = torch.randn(len(tasks), rows, rank), torch.randn(len(tasks), rank, columns)
        first, second = 0.3 * first, 0.3 * second
        for number, own in enumerate(sums):
            own[name] = matrix + scale / rank * (first[number] @ second[number])
        stem = name.removesuffix(".weight") + ".parametrizations.weight"
        a, b = (first, second) if "embeddings" in name else (second, first)
        tensors |= {f"{stem}.original": matrix, f"{stem}.0.lora_A": a, f"{stem}.0.lora_B": b}
        del tensors[name]
    made = {}
    for task, own in zip(tasks, sums, strict=True):
        named = {name.removeprefix("roberta."): tensor for name, tensor in own.items()}
        with TemporaryDirectory() as folder:
            shutil.copy(path / "config.json", folder)
            save_file(named, Path(folder, "model.safetensors"), metadata={"format": "pt"})
            made[task] = transformers.AutoModel.from_pretrained(folder).eval()
    return made


def _rank(name: str) -> str:
    """Queries come before keys and values where they are joined."""
    return name.replace(".self.query", ".self.a")


def _model(small: dict[str, Any]) -> Any:
    """Transformers' model for such a file, with the frequencies that the published code has."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": VOCAB,
        "pad_token_id": small.get("pad_token_id"),
        "type_vocab_size": small["type_vocab_size"],
        "max_position_embeddings": small.get("max_position_embeddings", 4096),
        "layer_norm_eps": small.get("layer_norm_eps", small.get("layer_norm_epsilon")),
        "num_labels": 1,
    }
    theta = small.get("rope_theta", small.get("rotary_emb_base"))
    if theta is None:
        config = transformers.XLMRobertaConfig(**sizes)
        return transformers.XLMRobertaForSequenceClassification(config)
    sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": float(theta)}
    if small["model_type"] not in ("nomic_bert", "xlm-roberta"):
        scores = "ForSequenceClassification" in small["architectures"][0]
        kind = transformers.GteForSequenceClassification if scores else transformers.GteModel
        model = kind(transformers.GteConfig(**sizes))
        if small["rope_scaling"]:
            _scale(model, theta, small["rope_scaling"]["factor"])
        return model
    if "num_experts" not in small and "lora_adaptations" not in small:
        return transformers.NomicBertModel(transformers.NomicBertConfig(**sizes))
    # Jina's is the same model as Nomic's, before experts are put into every other layer.
    config = transformers.JinaEmbeddingsV3Config(**sizes)
    adapted = "lora_adaptations" in small
    model = transformers.JinaEmbeddingsV3Model(config, add_pooling_layer=adapted)
    if adapted:
        return model
    model.layers[1].mlp = _Experts(small["moe_top_k"])
    return model


def _scale(model: nn.Module, theta: float, factor: float) -> None:
    """As GTE's published code scales rotary embeddings, by NTK."""
    exponents = torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM
    frequencies = (theta * factor) ** -exponents / factor ** (2 / HEAD_DIM)
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = frequencies


class _Experts(nn.Module):
    """Nomic's experts with the names of their published weights, all computed for each token."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Module()
        self.router.layer = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.Module()
        self.experts.bias = nn.Parameter(torch.zeros(HIDDEN))
        self.experts.mlp = nn.Module()
        for name in ("w1", "w2"):
            matrices = nn.Parameter(torch.zeros(EXPERTS * 2 * HIDDEN, HIDDEN))
            setattr(self.experts.mlp, name, matrices)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`states` and the result: [prompts, tokens, hidden size]."""
        first, second = (
            matrices.view(EXPERTS, 2 * HIDDEN, HIDDEN) for matrices in self.experts.mlp.parameters()
        )
        inner = nn.functional.gelu(torch.einsum("pth,eih->ptei", states, first))
        given = torch.einsum("ptei,eih->pteh", inner, second)
        shares = self.router.layer(states).softmax(dim=-1)
        least = shares.topk(self.chosen).values[..., -1:]
        shares = shares.where(shares >= least, 0)
        return torch.einsum("pteh,pte->pth", given, shares) + self.experts.bias
