"""What clients may send: what vLLM's request models make of it, and what is changed before.

Every item that clients were seen to stumble over has a test here, by the body that they send.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from vllm.exceptions import VLLMValidationError

from appliance.frontend import fields
from appliance.frontend.fields import Checked, check, request_models, table
from appliance.http.errors import BadRequest
from appliance.service.front_paths import is_front_path

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT, EMBED = "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"
USER: dict[str, Any] = {"role": "user", "content": "Hello"}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [USER]},
    COMPLETION: {"model": "m", "prompt": "Hello"},
    RESPONSES: {"model": "m", "input": "Hello"},
    MESSAGES: {"model": "m", "messages": [USER], "max_tokens": 5000},
    COUNT: {"model": "m", "messages": [USER]},
    EMBED: {"model": "m", "input": "Hello"},
}
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}


def asked(
    path: str, changes: dict[str, Any], *, strict: bool = False, reasons: bool = True
) -> tuple[Checked, dict[str, Any]]:
    """What the check says of the least body with `changes`, and the body that vLLM reads."""
    sent = msgspec.json.encode(LEAST[path] | changes)
    body = msgspec.json.decode(sent, type=dict[str, msgspec.Raw])
    checked = check(path, body, strict=strict, reasons=reasons)
    read = sent if checked.body is None else msgspec.json.encode(checked.body)
    return checked, msgspec.json.decode(read)


def accepted(path: str, changes: dict[str, Any], *, reasons: bool = True) -> BaseModel:
    """vLLM's request, made of what passes the check."""
    _, body = asked(path, changes, reasons=reasons)
    kinds: Any = request_models()[path]
    request = TypeAdapter(kinds[0] if len(kinds) == 1 else _union(kinds)).validate_json(
        msgspec.json.encode(body)
    )
    assert isinstance(request, BaseModel)
    return request


def _union(kinds: tuple[type[BaseModel], ...]) -> Any:
    found: Any = kinds[0]
    for kind in kinds[1:]:
        found = found | kind
    return found


# --- what vLLM accepts by itself, for which nothing is done ---------------------------------------


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        # B 10, 11
        (CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
        (EMBED, {"truncate_prompt_tokens": -1}),
        # C 15 to 18
        (CHAT, {"messages": [USER | {"name": "ann"}]}),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": None}, USER]}),
        *[(CHAT, {"reasoning_effort": one}) for one in ("none", "minimal", "low", "high", "xhigh")],
        (CHAT, {"seed": -1}),
        (COMPLETION, {"seed": -1}),
        # C 21
        (COMPLETION, {"echo": True, "logprobs": 1, "max_tokens": 0}),
        (COMPLETION, {"prompt_logprobs": 1}),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": False}),
        (CHAT, {"allowed_token_ids": [1], "bad_words": ["x"], "include_reasoning": False}),
        (CHAT, {"logprobs": True, "logprob_token_ids": [1], "return_tokens_as_token_ids": True}),
        (CHAT, {"skip_special_tokens": False, "include_stop_str_in_output": True}),
        (CHAT, {"chat_template": "x", "documents": [{"text": "a"}], "cache_salt": "x"}),
        # C 24, 25
        (EMBED, {"input": None, "messages": [USER]} | {"input": "Hello"}),
        (CHAT, {"model": None}),
    ],
    ids=str,
)
def test_vllm_accepts_it(path: str, changes: dict[str, Any]) -> None:
    """And nothing of it is ignored or rewritten."""
    checked, _ = asked(path, changes, strict=True)

    assert (checked.ignored, checked.body) == ((), None)
    accepted(path, changes)


# --- hints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        *[
            (CHAT, {name: value})
            for name, value in {
                "user": "ann",
                "safety_identifier": "ann",
                "prompt_cache_key": "key",
                "prompt_cache_retention": "24h",
                "verbosity": "low",
                "prediction": {"type": "content", "content": "x"},
                "service_tier": "priority",
                "store": True,
                "metadata": {"a": "b"},
                "cache_control": {"type": "ephemeral"},
                "thinking_token_budget": 100,
            }.items()
        ],
        (RESPONSES, {"prompt_cache_key": "key"}),
        (RESPONSES, {"service_tier": "priority"}),
        (RESPONSES, {"client_metadata": {"a": "b"}}),
        (MESSAGES, {"metadata": {"user_id": "ann"}}),
        (MESSAGES, {"context_management": {"edits": []}}),
        (MESSAGES, {"service_tier": "auto_only"}),
        (EMBED, {"user": "ann"}),
    ],
    ids=str,
)
def test_hints_are_accepted_and_named(path: str, changes: dict[str, Any]) -> None:
    """Strictly, too: they are known."""
    checked, _ = asked(path, changes, strict=True)

    assert checked.header == next(iter(changes))
    accepted(path, changes)


@pytest.mark.parametrize(
    ("path", "changes", "named"),
    [
        (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (RESPONSES, {"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.summary"),
        (RESPONSES, {"include": ["reasoning.encrypted_content"]},
         "include.reasoning.encrypted_content"),
        (MESSAGES, {"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    ],
    ids=str,
)  # fmt: skip
def test_hints_inside_of_others_are_named(path: str, changes: dict[str, Any], named: str) -> None:
    checked, _ = asked(path, changes, strict=True)

    assert checked.header == named
    accepted(path, changes)


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (CHAT, {"store": False}),
        (CHAT, {"service_tier": "auto"}),
        (CHAT, {"user": None, "metadata": None, "audio": None, "functions": None}),
        (CHAT, {"modalities": ["text"]}),
        (COMPLETION, {"best_of": 1}),
        (RESPONSES, {"metadata": {"a": "b"}, "user": "ann"}),
        (MESSAGES, {"service_tier": "standard_only", "mcp_servers": []}),
    ],
    ids=str,
)
def test_what_happens_anyway_is_not_named(path: str, changes: dict[str, Any]) -> None:
    assert asked(path, changes, strict=True)[0].ignored == ()


@pytest.mark.parametrize("path", [CHAT, COMPLETION, RESPONSES, EMBED])
def test_flex_is_work_of_the_class_batch(path: str) -> None:
    checked, _ = asked(path, {"service_tier": "flex"}, strict=True)

    assert (checked.flex, checked.ignored) == (True, ())
    assert not asked(path, {"service_tier": "default"})[0].flex


@pytest.mark.parametrize("tier", ["priority", "scale"])
def test_an_answer_repeats_no_tier_that_there_is_not(tier: str) -> None:
    """It says the one that it had, as OpenAI's do."""
    checked, _ = asked(RESPONSES, {"service_tier": tier}, strict=True)

    assert checked.body is not None
    assert msgspec.json.decode(checked.body["service_tier"]) == "default"
    assert checked.header == "service_tier"
    kept, _ = asked(RESPONSES, {"service_tier": "flex"}, strict=True)
    assert kept.body is None or msgspec.json.decode(kept.body["service_tier"]) == "flex"


# --- what would change the answer ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "changes", "remedy"),
    [
        (CHAT, {"modalities": ["text", "audio"]}, "answers are text"),
        (CHAT, {"audio": {"voice": "ash", "format": "wav"}}, "answers are text"),
        (CHAT, {"web_search_options": {}}, "offer a function"),
        (CHAT, {"functions": [FUNCTION]}, "use tools"),
        (CHAT, {"function_call": "auto"}, "use tool_choice"),
        (CHAT, {"guided_json": {}}, "use structured_outputs.json"),
        (COMPLETION, {"guided_regex": "a"}, "use structured_outputs.regex"),
        (COMPLETION, {"best_of": 3}, "ask for n answers"),
        (RESPONSES, {"conversation": "conv_1"}, "use previous_response_id"),
    ],
)
def test_what_would_change_the_answer_is_refused(
    path: str, changes: dict[str, Any], remedy: str
) -> None:
    """With the field's name, and what to do."""
    with pytest.raises(BadRequest, match=remedy) as refused:
        asked(path, changes)

    (name,) = changes
    assert refused.value.body.error.param == name
    assert refused.value.body.error.message.startswith(f"{name}: ")


@pytest.mark.parametrize("task", ["retrieval.passage", "none", 5])
def test_another_task_than_that_of_a_model_is_refused(task: object) -> None:
    """Its own is what happens anyway; a model without tasks does not know the field."""
    sent = {"task": task}
    own = msgspec.json.encode(LEAST[EMBED] | {"task": "retrieval.query"})
    body = msgspec.json.decode(own, type=dict[str, msgspec.Raw])
    other = body | {"task": msgspec.Raw(msgspec.json.encode(task))}

    assert check(EMBED, body, strict=True, embedding_task="retrieval.query").ignored == ()
    with pytest.raises(BadRequest, match=r"embeds for retrieval.query; ask for the model that"):
        check(EMBED, other, strict=False, embedding_task="retrieval.query")
    assert asked(EMBED, sent)[0].ignored == ("task",)


# --- what is not known ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*LEAST])
def test_unknown_fields_are_ignored_and_named(path: str) -> None:
    checked, _ = asked(path, {"frobnicate": 1})

    assert checked.header == "frobnicate"
    accepted(path, {"frobnicate": 1})


@pytest.mark.parametrize("path", [*LEAST])
def test_unknown_fields_are_refused_strictly(path: str) -> None:
    """With the name that was probably meant."""
    with pytest.raises(BadRequest, match=r"modle: unknown.*did you mean model\?") as refused:
        asked(path, {"modle": 1}, strict=True)

    assert refused.value.body.error.param == "modle"
    with pytest.raises(BadRequest, match=r"frobnicate: .*remove it"):
        asked(path, {"frobnicate": 1}, strict=True)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings"])
def test_ollamas_unknown_fields(path: str) -> None:
    """Ollama ignores them."""
    body = {"model": msgspec.Raw(b'"m"'), "frobnicate": msgspec.Raw(b"1")}

    assert check(path, body, strict=False).ignored == ("frobnicate",)
    with pytest.raises(BadRequest, match="frobnicate: unknown field"):
        check(path, body, strict=True)


def test_a_header_holds_no_more_than_it_should() -> None:
    """Names come from clients: their number and their letters are bounded."""
    changes = {f"x{n}": 1 for n in range(50)} | {"a\r\nset-cookie: b": 1, "é" * 999: 1}

    checked, _ = asked(CHAT, changes)

    assert checked.header.startswith("x0, x1, ")
    assert checked.header.endswith("x19, and 31 more")
    assert asked(CHAT, {"a\r\nset-cookie: b": 1})[0].header == "?"


# --- null ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETION, RESPONSES, MESSAGES])
def test_null_is_as_if_a_field_was_left_out(path: str) -> None:
    """For every field with a default, also where vLLM's model refuses null."""
    model = request_models()[path][0]
    names = [name for name, one in model.model_fields.items() if not one.is_required()]
    nulls = {name: None for name in names if name not in LEAST[path]}

    checked, _ = asked(path, nulls, strict=True)

    assert checked.ignored == ()
    accepted(path, nulls)


# --- B 12: Codex ---------------------------------------------------------------------------------

CODEX: dict[str, Any] = {
    "model": "m",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Sandboxed."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I"}]},
        {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {"type": "object", "properties": {"command": {"type": "array"}}},
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {"type": "something_newer", "name": "x"},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0198",
    "text": {"verbosity": "low"},
    "client_metadata": {"x": "y"},
}


def test_codex() -> None:
    """Tools that nothing here can call are left out, and named."""
    checked, body = asked(RESPONSES, CODEX, strict=True)

    assert [tool["name"] for tool in body["tools"]] == ["shell"]
    assert set(checked.ignored) == {
        *("tools.web_search", "tools.local_shell", "tools.something_newer", "tools.custom"),
        *("include.reasoning.encrypted_content", "text.verbosity", "reasoning.summary"),
        *("prompt_cache_key", "client_metadata"),
    }
    accepted(RESPONSES, CODEX)


FLAT = {"type": "function", **FUNCTION}
SEARCH = {"type": "web_search"}


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([FLAT, SEARCH], {"type": "web_search"}),
        ([FLAT, SEARCH], {"type": "mcp", "server_label": "x"}),
        ([SEARCH], "required"),
        (CODEX["tools"], {"type": "custom", "name": "apply_patch"}),
    ],
    ids=str,
)
def test_a_tool_that_is_left_out_cannot_be_forced(tools: list[Any], choice: Any) -> None:
    with pytest.raises(BadRequest, match="nothing here can run it") as refused:
        asked(RESPONSES, {"tools": tools, "tool_choice": choice})

    assert refused.value.body.error.param == "tool_choice"


def test_where_no_tool_is_left_nothing_is_chosen() -> None:
    _, body = asked(RESPONSES, {"tools": [SEARCH], "tool_choice": "auto"})

    assert not {"tools", "tool_choice"} & body.keys()


@pytest.mark.parametrize("kind", ["custom", "namespace"])
def test_tools_that_vllm_makes_functions_of_stay(kind: str) -> None:
    tool: dict[str, Any] = {"type": kind, "name": "x", "description": "d"}
    if kind == "namespace":
        tool["tools"] = [FLAT]

    assert asked(RESPONSES, {"tools": [tool]}, strict=True)[0] == ((), None, False)
    accepted(RESPONSES, {"tools": [tool]})


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_allowed_tools(path: str) -> None:
    """The model is shown only the tools that it may call."""
    names = ["f", "g"]
    tools: list[Any] = [FLAT | {"name": name} for name in names]
    choice: dict[str, Any] = {"mode": "required", "tools": [{"type": "function", "name": "g"}]}
    if path == CHAT:
        tools = [{"type": "function", "function": FUNCTION | {"name": name}} for name in names]
        allowed = {"type": "function", "function": {"name": "g"}}
        choice = {"allowed_tools": {"mode": "required", "tools": [allowed]}}
    changes = {"tools": tools, "tool_choice": {"type": "allowed_tools", **choice}}

    _, body = asked(path, changes)

    assert (body["tools"], body["tool_choice"]) == (tools[1:], "required")
    accepted(path, changes)


def test_includes_that_vllm_does_not_know() -> None:
    _, body = asked(
        RESPONSES, {"include": ["web_search_call.results", "message.output_text.logprobs"]}
    )

    assert body["include"] == ["message.output_text.logprobs"]


def test_custom_tools_of_chats_are_left_out() -> None:
    tools = [
        {"type": "custom", "custom": {"name": "x"}},
        {"type": "function", "function": FUNCTION},
    ]

    checked, body = asked(CHAT, {"tools": tools})

    assert (checked.header, body["tools"]) == ("tools.custom", tools[1:])


# --- B 13: Claude Code ---------------------------------------------------------------------------

CLAUDE_CODE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "List.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A list.", "signature": "x"},
                {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "a.py", "is_error": False},
            ],
        },
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command.",
            "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
            "cache_control": {"type": "ephemeral"},
            "eager_input_streaming": True,
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}


@pytest.mark.parametrize("reasons", [True, False])
def test_claude_code(reasons: bool) -> None:
    """A model that does not reason is not asked to think, rather than refused."""
    checked, body = asked(MESSAGES, CLAUDE_CODE, strict=True, reasons=reasons)

    assert [tool["name"] for tool in body["tools"]] == ["Bash"]
    assert set(checked.ignored) == {
        *("metadata", "context_management", "tools.web_search_20250305"),
        *(() if reasons else ("thinking",)),
    }
    assert ("thinking" in body) is reasons
    accepted(MESSAGES, CLAUDE_CODE, reasons=reasons)


def test_count_tokens_takes_what_a_message_takes() -> None:
    sent = {name: value for name, value in CLAUDE_CODE.items() if name != "stream"}

    asked(COUNT, sent, strict=True)
    accepted(COUNT, sent)


def test_a_budget_of_thoughts_is_named() -> None:
    """Nothing bounds it; one that is not allowed is left for vLLM to refuse."""
    thinking = {"type": "enabled", "budget_tokens": 2048}

    checked, body = asked(MESSAGES, {"thinking": thinking})

    assert (checked.header, body["thinking"]) == ("thinking.budget_tokens", {"type": "adaptive"})
    for budget in (100, 5000):
        with pytest.raises(ValidationError):
            accepted(MESSAGES, {"thinking": thinking | {"budget_tokens": budget}})


def test_no_tools_at_all() -> None:
    """An empty list is as if it was left out: many models could not choose."""
    _, body = asked(MESSAGES, {"tools": [], "tool_choice": {"type": "auto"}})

    assert not {"tools", "tool_choice"} & body.keys()


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "web_search"}])
def test_a_tool_of_anthropics_cannot_be_forced(choice: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="nothing here can run it"):
        asked(MESSAGES, {"tools": [CLAUDE_CODE["tools"][1]], "tool_choice": choice})


def test_the_betas_name_of_the_output_format() -> None:
    described = {"type": "json_schema", "schema": {"type": "object"}}

    checked, body = asked(MESSAGES, {"output_format": described}, strict=True)

    assert checked.ignored == ()
    assert body["output_config"] == {"format": described}
    assert "output_format" not in body


# --- all of it -----------------------------------------------------------------------------------


def test_every_front_path_with_a_body_has_rules() -> None:
    posts = {path for path in table() if "{" not in path}

    assert all(is_front_path(path) for path in posts)


def test_the_lists_do_not_overlap() -> None:
    for rules in table().values():
        lists = [rules.obeyed, rules.hints.keys(), rules.refused.keys()]
        assert sum(map(len, lists)) == len(rules.known)


@pytest.mark.parametrize(
    "wrong",
    [{"tools": 1}, {"tools": [1]}, {"tools": [None]}, {"tool_choice": 1}, {"tools": {"a": 1}}],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_what_has_the_wrong_type_is_left_for_vllm_to_refuse(
    path: str, wrong: dict[str, Any]
) -> None:
    with pytest.raises((ValidationError, VLLMValidationError, TypeError)):  # 400 each
        accepted(path, wrong)


def test_other_paths_are_not_looked_at() -> None:
    assert check("/v1/files", {"x": msgspec.Raw(b"1")}, strict=True) == ((), None, False)
    assert fields.IGNORED_HEADER == "x-appliance-ignored"


def test_the_page_has_the_same_lists() -> None:
    """docs/api.md: a table of hints, and one of what is refused."""
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    shown: dict[str, dict[str, set[str]]] = {}
    for kind, rows in re.findall(r"^\| endpoint \| (\w+) \|\n\|[-|]+\n((?:\|.*\n)+)", page, re.M):
        for row in rows.splitlines():
            path, *names = re.findall(r"`([^`]+)`", row)
            shown.setdefault(kind, {})[path] = set(names)

    rules = table()
    assert len(shown["hints"]) == 6
    assert shown["hints"] == {path: set(rules[path].hints) for path in shown["hints"]}
    assert shown["refused"] == {
        path: set(rules[path].refused) for path in shown["hints"] if rules[path].refused
    }
