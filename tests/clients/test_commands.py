"""Programs with a command line: `llm`, aider, lm-eval, guidellm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.clients.conftest import BUILD, ROOT, SCHEMA, Appliance, Stay
from tests.docblocks import code_blocks
from tests.parrot import ANSWER

QUESTION = {"question": "What flows through Rome?", "answer": "the Tiber", "choices": ["a", "b"]}
TASK = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""


def test_llm(tmp_path: Path, recipe: Callable[..., str], run: Callable[..., str]) -> None:
    """An answer in a stream, one that is whole, and one of a schema."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        recipe(code_blocks("docs/recipes/llm.md", "yaml"))
    )
    asked = recipe(code_blocks("docs/recipes/llm.md", "sh")).strip()

    def said(more: str) -> str:
        return run(f"{asked} {more}", LLM_USER_PATH=str(tmp_path))

    assert ANSWER in said("")
    assert ANSWER in said("--no-stream")
    Stay.model_validate_json(
        said(f"--no-stream -o max_tokens 1000 --schema '{json.dumps(SCHEMA)}'")
    )


def test_aider(
    tmp_path: Path, appliance: Appliance, recipe: Callable[..., str], run: Callable[..., str]
) -> None:
    """A message that changes nothing, in both dialects."""
    quiet = " --no-git --yes-always --no-check-update --no-show-model-warnings --no-analytics"
    command = (
        recipe(code_blocks("docs/recipes/aider.md", "sh")).strip() + quiet + " --message Hello"
    )
    path = BUILD / "aider/bin"
    ollama = command.replace("openai/small", "ollama_chat/small")

    assert ANSWER in run(command, path=path)
    assert ANSWER in run(ollama, path=path, OLLAMA_API_BASE=appliance.url)


def test_lm_eval(tmp_path: Path, recipe: Callable[..., str], run: Callable[..., str]) -> None:
    """A task of likelihoods by completions, one of answers by chats; both of one question."""
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(QUESTION) + "\n")
    task = TASK.format(file=data)
    (tmp_path / "likelihoods.yaml").write_text(
        f"task: likelihoods\n{task}output_type: multiple_choice\n"
        'doc_to_choice: "{{choices}}"\ndoc_to_target: 0\nmetric_list: [{metric: acc}]\n'
    )
    (tmp_path / "answers.yaml").write_text(
        f"task: answers\n{task}output_type: generate_until\n"
        'doc_to_target: "{{answer}}"\nmetric_list: [{metric: exact_match}]\n'
        "generation_kwargs: {max_gen_toks: 40, until: []}\n"
    )
    commands = recipe(code_blocks("docs/recipes/lm-eval.md", "sh")).replace(
        "hellaswag", "likelihoods"
    )
    commands = commands.replace("gsm8k", "answers").replace("lm_eval ", "lm_eval --include_path . ")

    said = run(commands)
    assert "|likelihoods|" in said
    assert "|answers" in said


def test_guidellm(tmp_path: Path, recipe: Callable[..., str], run: Callable[..., str]) -> None:
    """All its requests are answered. Its torch, which only reads data, is the appliance's: that of
    the registry may be 4 GB."""
    (packages,) = ROOT.glob(".venv/lib/python*/site-packages")
    for name in ("torch", "torchgen", "functorch", "sympy", "mpmath", "networkx", "nvidia"):
        for path in (packages / name, *packages.glob(f"{name}-*.dist-info")):
            (tmp_path / path.name).symlink_to(path)

    run(recipe(code_blocks("docs/recipes/guidellm.md", "sh")), PYTHONPATH=str(tmp_path))

    (benchmark,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (8, 0)
