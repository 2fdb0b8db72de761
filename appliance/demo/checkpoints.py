"""Small, deterministic checkpoints: six models, three architectures, six shapes of KV cache.

They are real checkpoints (safetensors, config, byte-level BPE tokenizer, chat template) with
random weights: what they say means nothing, but every token depends on the whole context, so a
wrong byte anywhere in weights or KV cache shows in the text. Same code, same bytes, on every run.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

RECIPE_VERSION: Final = 1
"""Raised whenever the made bytes change on purpose, so that older checkpoints are made anew."""

MARKER: Final = "complete.json"
VOCABULARY_SIZE: Final = 2048
MAX_POSITIONS: Final = 2048
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL_TOKENS: Final = (BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>")
BOS_ID, EOS_ID, PAD_ID = range(3)

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('this model knows the roles system, user and assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

Tensors: TypeAlias = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The shape of one demo model; `family` is the model type of its ``config.json``."""

    name: str
    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    seed: int


RECIPES: Final = tuple(
    Recipe(
        name=name,
        family=family,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        seed=seed,
    )
    for seed, (
        name, family, layers, hidden, intermediate, heads, kv_heads, head_dim
    ) in enumerate(
        (
            ("llama-a", "llama", 4, 256, 768, 4, 4, 64),
            ("llama-b", "llama", 4, 320, 896, 10, 10, 32),
            ("llama-c", "llama", 4, 288, 768, 3, 3, 96),
            ("qwen2-a", "qwen2", 4, 256, 896, 4, 2, 64),
            ("qwen2-b", "qwen2", 3, 384, 768, 6, 2, 64),
            ("qwen3-a", "qwen3", 6, 256, 640, 4, 2, 128),
        ),
        start=1,
    )
)  # fmt: skip

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def make_checkpoints(
    directory: Path, names: Iterable[str] | None = None, recipes: Iterable[Recipe] = RECIPES
) -> list[Path]:
    """Make the named models (default: all) below `directory`; returns their directories.

    A checkpoint that is already there and whole (its bytes match its marker) is left alone.
    Raises `ValueError` for a name without a recipe.
    """
    known = {recipe.name: recipe for recipe in recipes}
    wanted = list(known if names is None else names)
    if unknown := sorted(set(wanted) - set(known)):
        raise ValueError(f"no demo model {', '.join(unknown)}; there are {', '.join(known)}")
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / name for name in wanted]
    missing = [path for path in paths if not _is_complete(path, known[path.name])]
    if missing:
        tokenizer = train_tokenizer()
        for path in missing:
            _make(path, known[path.name], tokenizer)
    return paths


def write_config(
    directory: Path,
    names: Sequence[str] | None = None,
    *,
    bind: str = "127.0.0.1:11500",
    kind: str = "cpu",
    instances: int = 2,
    memory: str = "48MiB",
    slab: str = "512KiB",
    host_cache: str = "512MiB",
    policy: str = "appliance",
    max_context: int = 1024,
    dtype: str = "float32",
) -> Path:
    """Write ``appliance.toml`` for the checkpoints made in `directory`; returns its path.

    The default pool holds the weights of about a third of the six models, and their KV cache.
    """
    chosen = [recipe.name for recipe in RECIPES] if names is None else list(names)
    sections = [
        f'[api]\nbind = {json.dumps(bind)}\nadmin_socket = ""\n',
        f"[devices]\nkind = {json.dumps(kind)}\ninstances = {instances}\n"
        f"memory = {json.dumps(memory)}\nslab = {json.dumps(slab)}\n"
        f"host_cache = {json.dumps(host_cache)}\n",
        f"[policy]\nuse = [{json.dumps(policy)}]\n",
    ]
    sections += [
        f"[[model]]\nname = {json.dumps(name)}\n"
        f"path = {json.dumps(str((directory / name).absolute()))}\n"
        f"max_context = {max_context}\ndtype = {json.dumps(dtype)}\n"
        'slo = { ttft = "10s", tbt = "100ms" }\n'
        for name in chosen
    ]
    text = "\n".join(sections)
    tomllib.loads(text)
    path = directory / "appliance.toml"
    path.write_text(text, encoding="utf-8")
    return path


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE of exactly `VOCABULARY_SIZE` tokens, trained on this package's corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_corpus()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
    )
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise ValueError(
            f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {VOCABULARY_SIZE}"
        )
    return tokenizer


def checkpoint_digest(path: Path) -> str:
    """SHA-256 over names and bytes of a checkpoint's files, the marker excepted."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.name != MARKER:
            digest.update(f"{file.name}:{file.stat().st_size}:".encode())
            with file.open("rb") as stream:
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
    return digest.hexdigest()


# --- one checkpoint ------------------------------------------------------------------------------


def _make(path: Path, recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Write next to `path`, then rename: a checkpoint is whole or absent, never half there."""
    partial = path.with_name(f".{path.name}.partial")
    for leftover in (partial, path):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    save_file(_weights(recipe), partial / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(partial / "tokenizer.json"))
    _write_json(partial / "config.json", _model_config(recipe))
    _write_json(partial / "tokenizer_config.json", _tokenizer_config())
    _write_json(
        partial / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID},
    )
    marker = {"recipe": _recipe_digest(recipe), "content": checkpoint_digest(partial)}
    _write_json(partial / MARKER, marker)
    partial.rename(path)


def _is_complete(path: Path, recipe: Recipe) -> bool:
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    return bool(
        marker.get("recipe") == _recipe_digest(recipe)
        and marker.get("content") == checkpoint_digest(path)
    )


def _recipe_digest(recipe: Recipe) -> str:
    ingredients = f"{RECIPE_VERSION}\n{recipe!r}\n{CHAT_TEMPLATE}\n{_corpus()}"
    return hashlib.sha256(ingredients.encode()).hexdigest()


def _corpus() -> str:
    return resources.files(__package__).joinpath("corpus.txt").read_text(encoding="utf-8")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _model_config(recipe: Recipe) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURES[recipe.family]],
        "model_type": recipe.family,
        "dtype": "float32",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": list(SPECIAL_TOKENS[3:]),
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


# --- weights -------------------------------------------------------------------------------------


class _Dice:
    """Normal float32 matrices from one seeded PCG64 stream, drawn in a fixed order."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def vector(self, size: int, std: float) -> NDArray[np.float32]:
        return self._generator.standard_normal(size, dtype=np.float32) * np.float32(std)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        """A projection that multiplies the length of a random input by about `gain`."""
        drawn = self._generator.standard_normal((rows, columns), dtype=np.float32)
        return drawn * np.float32(gain / math.sqrt(columns))


def _weights(recipe: Recipe) -> Tensors:
    dice = _Dice(recipe.seed)
    embedding = dice.matrix(VOCABULARY_SIZE, recipe.hidden, gain=math.sqrt(recipe.hidden))
    head = dice.matrix(VOCABULARY_SIZE, recipe.hidden)
    # Greedy text can end by itself (EOS), but never contains the other special tokens.
    head[[id_ for id_ in range(len(SPECIAL_TOKENS)) if id_ != EOS_ID]] = 0.0
    tensors: Tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(recipe.hidden, np.float32),
        "lm_head.weight": head,
    }
    for layer in range(recipe.layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = np.ones(recipe.hidden, np.float32)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = np.ones(recipe.hidden, np.float32)
        tensors |= _attention(f"{prefix}.self_attn", recipe, dice)
        tensors |= _mlp(f"{prefix}.mlp", recipe, dice)
    return tensors


def _attention(prefix: str, recipe: Recipe, dice: _Dice) -> Tensors:
    queries, keys = recipe.heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim
    # Sharp attention (large queries and keys) makes each token depend on particular earlier ones.
    tensors: Tensors = {
        f"{prefix}.q_proj.weight": dice.matrix(queries, recipe.hidden, gain=1.5),
        f"{prefix}.k_proj.weight": dice.matrix(keys, recipe.hidden, gain=1.5),
        f"{prefix}.v_proj.weight": dice.matrix(keys, recipe.hidden),
        f"{prefix}.o_proj.weight": dice.matrix(recipe.hidden, queries, gain=1.5),
    }
    if recipe.family == "qwen2":
        for projection, size in (("q", queries), ("k", keys), ("v", keys)):
            tensors[f"{prefix}.{projection}_proj.bias"] = dice.vector(size, 0.1)
    if recipe.family == "qwen3":
        for norm in ("q_norm", "k_norm"):
            tensors[f"{prefix}.{norm}.weight"] = np.full(recipe.head_dim, 1.5, np.float32)
    return tensors


def _mlp(prefix: str, recipe: Recipe, dice: _Dice) -> Tensors:
    return {
        f"{prefix}.gate_proj.weight": dice.matrix(recipe.intermediate, recipe.hidden, gain=1.5),
        f"{prefix}.up_proj.weight": dice.matrix(recipe.intermediate, recipe.hidden, gain=1.5),
        f"{prefix}.down_proj.weight": dice.matrix(recipe.hidden, recipe.intermediate),
    }
