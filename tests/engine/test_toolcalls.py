"""Tool calls and reasoning as vLLM's parsers read them, whole and in pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
import xgrammar

from appliance.dialogue import Begin, Parsers, ParserUnusable
from appliance.engines.protocol import GuideKind
from appliance.engines.vllm.toolcalls import ToolConversation
from appliance.toolcalls import CallPiece, Heard
from tests.engine.house import save_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Bonn"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "hotels")
]
NAMED = {"type": "function", "function": {"name": "hotels"}}
HERMES = (
    'Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    '<tool_call>{"name": "hotels", "arguments": {"city": "Bonn"}}</tool_call>'
)
PYTHONIC = "[weather(city='Rome'), hotels(city='Bonn')]"
REQUIRED = (
    '[{"name": "weather", "parameters": {"city": "Rome"}},'
    ' {"name": "hotels", "parameters": {"city": "Bonn"}}]'
)


@pytest.fixture
def path(checkpoints: dict[str, str]) -> str:
    return checkpoints["qwen2-gqa"]


def converse(path: str, parser: str | None, **fields: Any) -> ToolConversation:
    """A chat of two choices."""
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": ""}],
        "tools": TOOLS,
        "tool_choice": "auto",
        **fields,
    }
    return begin(path, Parsers(parser), (5, 6), chat)


def begin(
    path: str, parsers: Parsers, prompt: tuple[int, ...], chat: dict[str, Any]
) -> ToolConversation:
    return ToolConversation(Begin(1, path, parsers, json.dumps(chat).encode(), prompt, 2))


def streamed(conversation: ToolConversation, choice: int, text: str) -> Heard:
    """Heard letter by letter, and put together as clients do."""
    content, calls = "", dict[int, CallPiece]()
    for i, letter in enumerate(text + "\0"):
        last = i == len(text)
        heard = conversation.hear(choice, "" if last else letter, (3 + i,), last)
        content += heard.content
        for call in heard.calls:
            known = calls.get(call.index, CallPiece(call.index, None, None, ""))
            calls[call.index] = CallPiece(
                call.index,
                known.id or call.id,
                known.name or call.name,
                known.arguments + call.arguments,
            )
    return Heard(content, tuple(calls[index] for index in sorted(calls)))


def said(heard: Heard) -> list[tuple[str | None, Any]]:
    """Names and arguments of the calls, each of which has an id."""
    assert all(call.id for call in heard.calls)
    return [(call.name, json.loads(call.arguments)) for call in heard.calls]


ROME, BONN = ("weather", {"city": "Rome"}), ("hotels", {"city": "Bonn"})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("hermes", HERMES, "Let me see.", [ROME, BONN]),
        ("hermes", "No need.", "No need.", []),
        ("pythonic", PYTHONIC, "", [ROME, BONN]),
    ],
)
def test_a_model_that_may_choose(
    path: str, stream: bool, parser: str, text: str, content: str, calls: list[Any]
) -> None:
    """Content and calls are told apart, for every choice by itself."""
    conversation = converse(path, parser, stream=stream)
    for choice in (1, 0):
        heard = (
            streamed(conversation, choice, text)
            if stream
            else conversation.hear(choice, text, (1, 2), True)
        )
        assert (heard.content, said(heard)) == (content, calls)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_one_call_at_a_time(path: str, stream: bool) -> None:
    """Further calls are left out where the client wants no parallel ones."""
    conversation = converse(path, "hermes", stream=stream, parallel_tool_calls=False)
    heard = streamed(conversation, 0, HERMES) if stream else conversation.hear(0, HERMES, (), True)
    assert said(heard) == [ROME]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("choice", "text", "calls"),
    [("required", REQUIRED, [ROME, BONN]), (NAMED, '{"city": "Bonn"}', [BONN])],
    ids=["required", "named"],
)
def test_a_model_of_no_known_format(
    path: str, stream: bool, choice: Any, text: str, calls: list[Any]
) -> None:
    """It is guided to JSON, and that is read."""
    conversation = converse(path, None, stream=stream, tool_choice=choice)
    assert conversation.guide is not None
    assert conversation.guide.kind is GuideKind.JSON
    heard = streamed(conversation, 0, text) if stream else conversation.hear(0, text, (), True)
    assert (heard.content, said(heard)) == ("", calls)


def test_a_known_format_is_guided_in_its_own_way(path: str) -> None:
    """Who has to call writes calls as the model's parser reads them, and special tokens count."""
    conversation = converse(path, "hermes", tool_choice="required")
    assert conversation.guide is not None
    assert conversation.guide.kind is GuideKind.STRUCTURAL_TAG
    assert "<tool_call>" in conversation.guide.text
    assert '"Bonn"' in conversation.guide.text
    assert conversation.special_tokens


def test_a_format_beside_tools_is_a_guide(path: str) -> None:
    """A response format goes on to hold for a model that may choose."""
    schema = {"name": "x", "schema": {"type": "object"}}
    conversation = converse(
        path, None, response_format={"type": "json_schema", "json_schema": schema}
    )
    assert conversation.guide is not None
    assert conversation.guide.kind is GuideKind.JSON


def test_an_unknown_parser_is_unusable(path: str) -> None:
    """The message lists those that there are."""
    with pytest.raises(ParserUnusable, match=r"'nobody'.*hermes"):
        converse(path, "nobody")


def test_a_chat_that_vllm_refuses(path: str) -> None:
    """With vLLM's reason."""
    nowhere = {"type": "function", "function": {"name": "nowhere"}}
    with pytest.raises(ValueError, match="does not match any of the specified `tools`"):
        converse(path, None, tool_choice=nowhere)
    with pytest.raises(ValueError, match=r"\w"):
        converse(path, None, tools=[{"type": "function", "function": {}}])


def test_a_schema_that_is_none(thinker: Thinker) -> None:
    """What a parser chokes on is the client's, too."""
    function = {"name": "weather", "parameters": {"properties": {"city": 5}}}
    tools = [{"type": "function", "function": function}]
    with pytest.raises(ValueError, match="cannot make anything"):
        thinker.converse(None, tool="glm47", tools=tools)


@pytest.mark.parametrize("name", ["granite", "qwen3_xml", "pythonic", "internlm"])
def test_text_is_text_to_any_parser(path: str, name: str) -> None:
    """Families that vLLM reads in other ways: by an engine of its own, or by itself."""
    assert converse(path, name).hear(0, "hello", (1,), True) == Heard("hello")


@pytest.mark.parametrize("name", ["llama3_json", "mistral"])
def test_a_parser_may_want_another_tokenizer(path: str, name: str) -> None:
    """Then it is unusable, and says why."""
    with pytest.raises(ParserUnusable, match=name):
        converse(path, name)


THOUGHT, ANSWER = "Rome, then.", "It is sunny."
WRITTEN = f"<think>{THOUGHT}</think>{ANSWER}"


class Thinker:
    """A tokenizer that knows where thoughts begin and end, and chats with who has it."""

    def __init__(self, folder: Path) -> None:
        save_tokenizer(folder)
        self.path = str(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
        self.tokenizer.save_pretrained(folder)

    def tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def converse(
        self, reasoning: str | None, prompt: str = "so: ", tool: str | None = None, **fields: Any
    ) -> ToolConversation:
        chat = {"model": "m", "messages": [{"role": "user", "content": ""}], **fields}
        return begin(self.path, Parsers(tool, reasoning), self.tokens(prompt), chat)

    def hear(self, conversation: ToolConversation, text: str, stream: bool) -> Heard:
        """All that came of the text, whole or token by token."""
        tokens = self.tokens(text)
        if not stream:
            return conversation.hear(0, text, tokens, True)
        pieces = [
            conversation.hear(0, self.tokenizer.decode([token]), (token,), False)
            for token in tokens
        ]
        pieces.append(conversation.hear(0, "", (2,), True))
        return Heard(
            "".join(piece.content for piece in pieces),
            tuple(call for piece in pieces for call in piece.calls if call.id),
            "".join(piece.reasoning for piece in pieces),
            pieces[-1].reasoning_tokens,
        )


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Thinker:
    return Thinker(tmp_path_factory.mktemp("thinker"))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
def test_reasoning(thinker: Thinker, parser: str, stream: bool) -> None:
    """It is told from what the model says, and its tokens are counted."""
    conversation = thinker.converse(parser, stream=stream)
    heard = thinker.hear(conversation, WRITTEN, stream)

    assert (heard.reasoning, heard.content) == (THOUGHT, ANSWER)
    assert heard.reasoning_tokens == len(thinker.tokens(THOUGHT))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize("tool", [None, "hermes"])
def test_reasoning_that_the_prompt_has_ended(
    thinker: Thinker, parser: str, tool: str | None, stream: bool
) -> None:
    """All that comes is the answer, streamed or not, whether the model could call tools or not."""
    conversation = thinker.converse(parser, "so: <think></think>", tool, stream=stream)
    heard = thinker.hear(conversation, ANSWER, stream)

    assert heard == Heard(ANSWER)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_calls_behind_reasoning(thinker: Thinker, stream: bool) -> None:
    """Tools that the model only thinks of are not called."""
    called = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    conversation = thinker.converse("deepseek_r1", tool="hermes", tools=TOOLS, stream=stream)
    heard = thinker.hear(conversation, f"<think>{called}</think>{called}", stream)

    assert heard.reasoning == called
    assert [call.name for call in heard.calls] == ["weather"]


def allows(thinker: Thinker, conversation: ToolConversation, text: str) -> bool:
    """Whether the chat's guide allows this as the whole answer."""
    assert conversation.guide is not None
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo.from_huggingface(thinker.tokenizer, stop_token_ids=[2])
    )
    if conversation.guide.kind is GuideKind.STRUCTURAL_TAG:
        compiled = compiler.compile_structural_tag(conversation.guide.text)
    else:
        compiled = compiler.compile_builtin_json_grammar()
    matcher = xgrammar.GrammarMatcher(compiled)
    return all(matcher.accept_token(token) for token in (*thinker.tokens(text), 2))


def test_a_guide_holds_behind_reasoning(thinker: Thinker) -> None:
    """Thoughts are free; what follows them is of the format. Without thoughts, everything is."""
    fields: Any = {"response_format": {"type": "json_object"}}
    thinking = thinker.converse("qwen3", **fields)
    not_thinking = thinker.converse("qwen3", "so: <think></think>", **fields)

    assert allows(thinker, thinking, '<think>{"a": Rome!</think>{"a": 1}')
    assert not allows(thinker, thinking, "<think>Rome!</think>Rome!")
    assert allows(thinker, not_thinking, '{"a": 1}')
    assert not allows(thinker, not_thinking, '<think></think>{"a": 1}')


def test_tools_that_have_to_be_called_behind_reasoning(thinker: Thinker) -> None:
    """Also by a model of no known format: the guide of the calls follows the thoughts."""
    conversation = thinker.converse("qwen3", tools=TOOLS, tool_choice="required")
    text = f"<think>{THOUGHT}</think>{REQUIRED}"

    assert allows(thinker, conversation, text)
    heard = thinker.hear(conversation, text, False)
    assert (heard.reasoning, said(heard)) == (THOUGHT, [ROME, BONN])


@pytest.mark.parametrize("name", ["nobody", "openai_gptoss", "mistral"])
def test_a_reasoning_parser_that_cannot_be_used(thinker: Thinker, name: str) -> None:
    """There is none of that name, or not for this format or tokenizer: the message says so."""
    with pytest.raises(ParserUnusable, match=rf"reasoning parser '{name}'.*qwen3"):
        thinker.converse(name)


def test_a_guide_where_nobody_knows_when_reasoning_ends(thinker: Thinker) -> None:
    """It is refused: it would have to hold from there on."""
    with pytest.raises(ValueError, match="does not say where reasoning ends"):
        thinker.converse("granite", response_format={"type": "json_object"})


def test_another_model_of_the_same_name(tmp_path: Path) -> None:
    """Its chats are read with its own tokenizer."""
    chat = {"model": "m", "messages": [{"role": "user", "content": ""}]}
    save_tokenizer(tmp_path)
    with pytest.raises(ParserUnusable, match="deepseek_r1"):
        begin(str(tmp_path), Parsers(None, "deepseek_r1"), (5, 6), chat)

    conversation = Thinker(tmp_path).converse("deepseek_r1")

    assert conversation.hear(0, WRITTEN, (), True).reasoning == THOUGHT
