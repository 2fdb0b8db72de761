"""Names of vLLM's parsers, and what `auto` stands for: templates in the shapes of families."""

# ruff: noqa: RUF001  # tokens of DeepSeek have wide bars

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoints.model_config import known_models
from appliance.checkpoints.parsers.choose import choose_parsers
from appliance.checkpoints.parsers.families import REASONING_FAMILIES, TOOL_FAMILIES, Family
from appliance.checkpoints.parsers.names import (
    AUTO,
    ParserKind,
    committed_names,
    installed_names,
    parser_names,
    remedy_for,
)
from appliance.checkpoints.parsers.templates import chat_template, reads_variable
from appliance.vocabulary import Task
from tests.frontend.chat_templates import TEMPLATES

DOCS = Path(__file__).parents[3] / "docs" / "structured-outputs.md"

_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
JSON_CALL = r"{{ '<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>' }}"
XML_CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
KEYED_CALL = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
LLAMA_CALL = (
    '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument '
    "name and its value}.' }}"
)
DEEPSEEK_CALL = "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}"
DEEPSEEK_TOKEN = "<｜tool▁calls▁begin｜>"
BOTH: dict[str, Any] = {"tool_parser": AUTO, "reasoning_parser": AUTO}


def checkpoint(path: Path, model_type: str, template: Any, tokens: str = "") -> Path:
    path.mkdir(exist_ok=True)
    config = {"model_type": model_type, "architectures": ["AnyForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    described = {} if template is None else {"chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    words = {"model": {"vocab": {tokens: 1}}} if tokens else {}
    (path / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    return path


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("kind", ParserKind)
def test_the_committed_names_are_those_of_the_installed_vllm(kind: ParserKind) -> None:
    assert installed_names(kind) == committed_names(kind)


@pytest.mark.parametrize("kind", ParserKind)
def test_without_vllm_the_committed_names_count(
    kind: ParserKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.checkpoints.parsers.names.find_spec", lambda name: None)
    parser_names.cache_clear()
    try:
        assert parser_names(kind) == known_models().parsers[kind]
    finally:
        parser_names.cache_clear()


def test_a_name_that_is_nearly_right_gets_a_suggestion() -> None:
    assert remedy_for("hermez", ParserKind.TOOLS).startswith("did you mean hermes? (docs/")
    assert remedy_for("deepseek-r1", ParserKind.REASONING).startswith("did you mean deepseek_r1?")
    assert remedy_for("xyzzy", ParserKind.TOOLS).startswith('use "auto", or "" for none (docs/')


@pytest.mark.parametrize(
    ("kind", "families"),
    [(ParserKind.TOOLS, TOOL_FAMILIES), (ParserKind.REASONING, REASONING_FAMILIES)],
)
def test_the_table_names_parsers_that_there_are(
    kind: ParserKind, families: tuple[Family, ...]
) -> None:
    assert {family.parser for family in families} <= set(committed_names(kind))
    types = {name for family in families for name in family.types}
    assert types <= set(known_models().types)


@pytest.mark.parametrize("kind", ParserKind)
def test_the_page_lists_every_name(kind: ParserKind) -> None:
    page = DOCS.read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{kind}` |")]
    listed = [name.strip().strip("`") for name in row.split("|")[2].split(",")]
    assert tuple(listed) == committed_names(kind)


def test_the_page_has_every_row_of_the_table() -> None:
    page = DOCS.read_text(encoding="utf-8")
    for family in (*TOOL_FAMILIES, *REASONING_FAMILIES):
        marker = family.markers[0].replace("|", r"\|")
        row = f"| `{family.parser}` | `{marker}` |"
        assert row in page, row


# --- tools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "template", "token", "parser"),
    [
        ("qwen2", _TOOLS + JSON_CALL, "", "hermes"),
        ("qwen3", _TOOLS + JSON_CALL, "", "hermes"),
        ("llama", _TOOLS + JSON_CALL, "", "hermes"),
        ("qwen3_moe", _TOOLS + XML_CALL, "", "qwen3_xml"),
        ("glm4_moe", _TOOLS + KEYED_CALL, "", "glm47"),
        ("granitemoehybrid", _TOOLS + JSON_CALL, "", "granite4"),
        ("llama", _TOOLS + LLAMA_CALL, "<|python_tag|>", "llama3_json"),
        ("mistral", _TOOLS + "[TOOL_CALLS] [", "[TOOL_CALLS]", "mistral"),
        ("deepseek_v3", _TOOLS + DEEPSEEK_CALL, DEEPSEEK_TOKEN, "deepseek_v31"),
        ("deepseek_v3", _TOOLS + DEEPSEEK_CALL + "```json", DEEPSEEK_TOKEN, "deepseek_v3"),
        ("seed_oss", _TOOLS + "<seed:tool_call>", "", "seed_oss"),
        ("gemma4_text", _TOOLS + "<|tool_call>", "", "gemma4"),
    ],
)
def test_a_family_and_its_template_name_the_parser_of_tools(
    tmp_path: Path, model_type: str, template: str, token: str, parser: str
) -> None:
    path = checkpoint(tmp_path / "any", model_type, template, token)
    chosen = choose_parsers(path, **BOTH).tools
    assert chosen.name == parser
    assert chosen.reason.startswith(f"model type {model_type}, and ")


@pytest.mark.parametrize(
    ("model_type", "template", "reason"),
    [
        ("qwen2", None, "there is no chat template"),
        ("qwen2", JSON_CALL, "the chat template does not read tools"),
        # Of the shape of DeepSeek R1's distillates: calls that were made are shown, tools are not.
        (
            "qwen2",
            "{% for tool in message['tool_calls'] %}{{ 'tools' }}{% endfor %}",
            "the chat template does not read tools",
        ),
        ("qwen2", _TOOLS, "no parser is known for the chat template of a qwen2 model"),
        ("gpt2", _TOOLS + JSON_CALL, "no parser is known for the chat template of a gpt2 model"),
        ("llama", _TOOLS + KEYED_CALL, "no parser is known for the chat template of a llama model"),
        (
            "mistral",
            _TOOLS + "[TOOL_CALLS] [",
            "mistral needs [TOOL_CALLS], which tokenizer.json does not have",
        ),
    ],
)
def test_without_a_match_there_is_no_parser_of_tools(
    tmp_path: Path, model_type: str, template: str | None, reason: str
) -> None:
    path = checkpoint(tmp_path / "hermes-qwen", model_type, template)
    chosen = choose_parsers(path, **BOTH).tools
    assert (chosen.name, chosen.reason) == ("", reason)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_of_no_known_family_leads_to_none(tmp_path: Path, name: str) -> None:
    """The corpus of shapes has no words of any family, whether or not it reads tools."""
    path = checkpoint(tmp_path / "any", "llama", TEMPLATES[name])
    chosen = choose_parsers(path, **BOTH)
    assert (chosen.tools.name, chosen.reasoning.name) == ("", "")
    assert chosen.tools.reason
    assert chosen.reasoning.reason


def test_the_template_for_tools_counts_where_there_are_several(tmp_path: Path) -> None:
    several = [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": _TOOLS + JSON_CALL},
    ]
    path = checkpoint(tmp_path / "any", "llama", several)
    assert choose_parsers(path, **BOTH).tools.name == "hermes"
    assert chat_template(path) == "{{ messages }}"


def test_what_the_configuration_says_is_taken_as_it_is(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "any", "qwen3", _TOOLS + JSON_CALL)
    chosen = choose_parsers(path, "granite", "")
    assert (chosen.tools.name, chosen.tools.reason) == ("granite", "set in the configuration")
    assert (chosen.reasoning.name, chosen.reasoning.reason) == ("", "")


def test_a_model_that_embeds_gets_no_parser_unasked(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "any", "qwen3", _TOOLS + JSON_CALL)
    chosen = choose_parsers(path, AUTO, AUTO, Task.EMBED)
    assert (chosen.tools.name, chosen.tools.reason, chosen.reasoning.name) == ("", "", "")


def test_a_config_that_cannot_be_read_leads_to_none(tmp_path: Path) -> None:
    chosen = choose_parsers(tmp_path, **BOTH).tools
    assert chosen.name == ""
    assert chosen.reason.startswith("config.json cannot be read: ")


# --- reasoning -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "template", "parser"),
    [
        ("qwen3", "{{ '<think>' }}", "qwen3"),
        ("qwen3_moe", "{% if enable_thinking %}<think>{% endif %}", "qwen3"),
        ("qwen3", "{{ '<｜Assistant｜><think>\\n' }}", "deepseek_r1"),
        ("llama", "{{ '<｜Assistant｜><think>\\n' }}", "deepseek_r1"),
        ("qwen2", "{{ '<|im_start|>assistant\\n<think>\\n' }}", "deepseek_r1"),
        ("glm4_moe", "{{ '<think></think>' }}", "glm45"),
        ("seed_oss", "{{ '<seed:think>' }}", "seed_oss"),
        ("llama", "{{ content.split('</think>')[-1] }}", ""),
        ("qwen2", "{{ content.split('</think>')[-1] }}", ""),
    ],
)
def test_a_family_and_its_template_name_the_parser_of_reasoning(
    tmp_path: Path, model_type: str, template: str, parser: str
) -> None:
    path = checkpoint(tmp_path / "any", model_type, template)
    assert choose_parsers(path, **BOTH).reasoning.name == parser


# --- templates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{% if tools %}{% endif %}", True),
        ("{%- for t in tools -%}{%- endfor -%}", True),
        ("{{ tools | tojson }}", True),
        ("{{ 'tools' }}", False),
        ('{{ "some \\" tools" }}', False),
        ("{# tools #}", False),
        ("these are tools", False),
        ("{{ message.tools }}", False),
        ("{% if tools_in_user_message %}{% endif %}", False),
        ("", False),
    ],
)
def test_a_variable_is_read_by_code_only(template: str, reads: bool) -> None:
    assert reads_variable(template, "tools") is reads
