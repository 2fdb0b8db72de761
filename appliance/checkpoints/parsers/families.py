"""Which parser reads the words of which family: a table, by the type of the model and its template.

A model's type alone does not say how it writes calls (fine-tunes keep the type, and have templates
of their own), and a template alone does not either (several families write `<tool_call>`, with
different words in it). A row holds where both agree.
"""

# ruff: noqa: RUF001  # tokens of DeepSeek have wide bars

from __future__ import annotations

from typing import Final, NamedTuple


class Family(NamedTuple):
    """A row of the table: `parser` reads what models of `types` write whose template has all of
    `markers`, and none of `without`."""

    parser: str
    types: frozenset[str]
    """Values of `model_type` in config.json, of the language model."""
    markers: tuple[str, ...]
    """What the source of the template contains. The first is what a person is shown."""
    source: str
    """Where it is written that the parser is for the family."""
    without: tuple[str, ...] = ()
    token: str = ""
    """What has to be in tokenizer.json, without which vLLM refuses the parser."""


_GUIDE: Final = "vLLM's docs/features/tool_calling.md"
_REASONING: Final = "vLLM's docs/features/reasoning_outputs.md"
_CALL: Final = "<tool_call>"
_ARGUMENT: Final = "<arg_key>"
_FUNCTION: Final = "<function="
_QWEN: Final = frozenset(
    {
        "qwen2",
        "qwen2_moe",
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl_text",
        "qwen3_vl_moe_text",
        "qwen3_5_text",
        "qwen3_5_moe_text",
    }
)
_THINKING_QWEN: Final = frozenset(name for name in _QWEN if name.startswith("qwen3"))
_GLM: Final = frozenset({"glm4_moe", "glm4_moe_lite", "glm4v_moe_text"})

TOOL_FAMILIES: Final = (
    Family(
        "hermes",
        _QWEN | {"llama", "mistral"},  # Hermes 2 and 3 are of these
        (_CALL, "arguments"),
        f"{_GUIDE}, Qwen Models and Hermes Models",
        without=(_FUNCTION, _ARGUMENT, "<tool_calls>"),
    ),
    Family(
        "llama3_json",
        frozenset({"llama"}),
        ('"parameters": dictionary of argument name and its value',),
        f"{_GUIDE}, Llama Models",
        without=(_CALL,),
        token="<|python_tag|>",
    ),
    Family(
        "granite4",
        frozenset({"granitemoehybrid"}),
        (_CALL, "arguments"),
        f"{_GUIDE}, IBM Granite",
        without=(_FUNCTION, _ARGUMENT),
    ),
    Family(
        "deepseek_v3",
        frozenset({"deepseek_v3"}),
        ("<｜tool▁calls▁begin｜>", "```json"),
        f"{_GUIDE}, DeepSeek-V3 Models",
        token="<｜tool▁calls▁begin｜>",
    ),
    Family(
        "deepseek_v31",
        frozenset({"deepseek_v3"}),
        ("<｜tool▁calls▁begin｜>",),
        f"{_GUIDE}, DeepSeek-V3.1 Models",
        without=("```json",),
        token="<｜tool▁calls▁begin｜>",
    ),
    Family(
        "qwen3_xml",
        _QWEN,
        (_CALL, _FUNCTION, "<parameter="),
        f"{_GUIDE}, Qwen3-Coder Models",
    ),
    Family("glm47", _GLM, (_CALL, _ARGUMENT, "<arg_value>"), f"{_GUIDE}, GLM-4.7 Models"),
    Family(
        "mistral",
        frozenset({"mistral", "mixtral", "ministral3"}),
        ("[TOOL_CALLS]",),
        f"{_GUIDE}, Mistral Models",
        token="[TOOL_CALLS]",
    ),
    Family(
        "seed_oss",
        frozenset({"seed_oss"}),
        ("<seed:tool_call>",),
        "vLLM's seed_oss_engine_tool_parser.py",
    ),
    Family(
        "gemma4",
        frozenset({"gemma4_text"}),
        ("<|tool_call>",),
        "vLLM's gemma4_engine_tool_parser.py",
    ),
)
"""For calls of tools. A template has to read the variable `tools` as well: one that shows a model
only the calls that it made never tells it of any tool."""

REASONING_FAMILIES: Final = (
    Family(
        "deepseek_r1",
        frozenset({"qwen2", "qwen3", "llama", "deepseek_v3"}),
        ("<｜Assistant｜><think>",),
        f"{_REASONING}, DeepSeek R1 series",
    ),
    Family(
        "deepseek_r1",
        frozenset({"qwen2"}),
        (r"assistant\n<think>",),  # the backslash and the n of a text in the template
        f"{_REASONING}, QwQ-32B",
    ),
    Family("qwen3", _THINKING_QWEN, ("<think>",), f"{_REASONING}, Qwen3 series"),
    Family("glm45", _GLM, ("<think>",), f"{_REASONING}, GLM-4.5 series"),
    Family(
        "seed_oss",
        frozenset({"seed_oss"}),
        ("<seed:think>",),
        "vLLM's seed_oss_engine_reasoning_parser.py",
    ),
)
"""For reasoning."""
