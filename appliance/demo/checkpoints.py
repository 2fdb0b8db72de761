"""Small, deterministic checkpoints, of the kinds and shapes in `appliance.demo.recipes`.

They are real checkpoints (safetensors, config, byte-level BPE tokenizer, chat template) with
random weights: what they say means nothing, but every token depends on the whole context, so a
wrong byte anywhere in weights or KV cache shows in the text. Same code, same bytes, on every run.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from appliance.demo.recipes import (
    BOS,
    BOS_ID,
    EOS,
    EOS_ID,
    KINDS,
    MAX_POSITIONS,
    PAD,
    PAD_ID,
    RECIPES,
    SPECIAL_TOKENS,
    VOCABULARY_SIZE,
    Recipe,
    model_config,
    weights,
)

RECIPE_VERSION: Final = 1
"""Raised whenever the made bytes change on purpose, so that older checkpoints are made anew."""

MARKER: Final = "complete.json"
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


def make_checkpoints(
    directory: Path, names: Iterable[str] | None = None, recipes: Iterable[Recipe] = RECIPES
) -> list[Path]:
    """Make the named models below `directory`, by default all of `recipes`; returns their
    directories.

    A checkpoint that is already there and whole (its bytes match its marker) is left alone.
    Raises `ValueError` for a name without a recipe.
    """
    recipes = list(recipes)
    known = {recipe.name: recipe for recipe in (*recipes, *KINDS)}
    wanted = [recipe.name for recipe in recipes] if names is None else list(names)
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
    runtime: str = "",
    slab: str = "512KiB",
    host_cache: str = "512MiB",
    policy: str = "appliance",
    max_context: int = 1024,
    dtype: str = "auto",
    short_turns: bool = False,
) -> Path:
    """Write ``appliance.toml`` for the checkpoints made in `directory`; returns its path. `runtime`
    is for GPUs; `dtype` "auto" is what a model's recipe says. With `short_turns` models take turns
    sooner than they would with the default of the appliance's own policy.

    The default pool holds the weights of about a third of six models, and their KV cache.
    """
    chosen = [recipe.name for recipe in RECIPES] if names is None else list(names)
    sections = [
        f'[api]\nbind = {json.dumps(bind)}\nadmin_socket = ""\n',
        f"[devices]\nkind = {json.dumps(kind)}\ninstances = {instances}\n"
        f"memory = {json.dumps(memory)}\nslab = {json.dumps(slab)}\n"
        f"host_cache = {json.dumps(host_cache)}\n"
        + (f"runtime = {json.dumps(runtime)}\n" if runtime else ""),
        f"[policy]\nuse = [{json.dumps(policy)}]\n"
        + ("\n[policy.appliance]\nslack_target = 0.2\n" if short_turns else ""),
    ]
    sections += [
        f"[[model]]\nname = {json.dumps(name)}\n"
        f"path = {json.dumps(str((directory / name).absolute()))}\n"
        f"max_context = {max_context}\ndtype = {json.dumps(_dtype(name, dtype))}\n"
        'slo = { ttft = "10s", tbt = "100ms" }\n'
        for name in chosen
    ]
    text = "\n".join(sections)
    tomllib.loads(text)
    path = directory / "appliance.toml"
    path.write_text(text, encoding="utf-8")
    return path


def _dtype(name: str, asked: str) -> str:
    """What a model is computed in: if nothing is asked, what its recipe says."""
    if asked != "auto":
        return asked
    return next((r.dtype for r in (*RECIPES, *KINDS) if r.name == name), "float32")


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
    save_file(weights(recipe), partial / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(partial / "tokenizer.json"))
    _write_json(partial / "config.json", model_config(recipe))
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
