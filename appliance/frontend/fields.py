"""What clients may send: for each endpoint the fields that are obeyed, ignored, or refused.

*Obeyed* are the fields of vLLM's request models and ours. A *hint* asks for nothing that changes
the answer: it is accepted, not obeyed, and named in the header `IGNORED_HEADER`. A field that would
change the answer if it were obeyed, and is not, is *refused* by name. Every other field is unknown:
the original ignores it, so it is named in the header, or refused if `api.strict` is set.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin

import msgspec
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from appliance.errors import nearest
from appliance.frontend import rewrites
from appliance.frontend.ollama.requests import ChatBody, EmbedBody, EmbeddingsBody, GenerateBody
from appliance.frontend.rewrites import Body
from appliance.frontend.serving import input_tokens
from appliance.http.errors import BadRequest

IGNORED_HEADER: Final = "x-appliance-ignored"
MAX_NAMES: Final = 20
"""So many ignored fields are named in the header; the rest is counted."""

_ROUTERS: Final = (
    *("openai.chat_completion", "openai.completion", "openai.responses", "anthropic"),
    *("pooling.pooling", "pooling.classify", "pooling.scoring", "pooling.embed"),
    *("serve.tokenize", "scale_out.render"),
    *("speech_to_text.transcription", "speech_to_text.translation"),
)
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NULL: Final = b"null"
_FLEX: Final = b'"flex"'


@dataclass(frozen=True)
class FieldRefusal:
    """Why a field is refused: `remedy` says what to do. `allowed` values ask for nothing."""

    remedy: str
    allowed: tuple[object, ...] = ()


@dataclass(frozen=True)
class Rules:
    """The three lists of one endpoint."""

    obeyed: frozenset[str]
    hints: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """By name the values that say what happens anyway, so that nothing is ignored."""
    refused: Mapping[str, FieldRefusal] = field(default_factory=dict)
    not_null: frozenset[str] = frozenset()
    """Obeyed fields with a default whose null vLLM refuses; null is as if they were left out."""

    @property
    def known(self) -> frozenset[str]:
        return self.obeyed | self.hints.keys() | self.refused.keys()


class Checked(NamedTuple):
    """What came of a check."""

    ignored: tuple[str, ...]
    """Names for the header, safe to be put there."""
    body: dict[str, msgspec.Raw] | None
    """What vLLM shall read in place of the body that was sent; None: that body."""
    flex: bool
    """Whether it is work of the class batch."""

    @property
    def header(self) -> str:
        """The value of `IGNORED_HEADER`; "" if nothing was ignored."""
        more = len(self.ignored) - MAX_NAMES
        names = ", ".join(self.ignored[:MAX_NAMES])
        return f"{names}, and {more} more" if more > 0 else names


_TIERS: Final = ("auto", "default", "flex", "standard_only")
_HINTS: Final[dict[str, tuple[object, ...]]] = {
    "user": (),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "prompt_cache_options": (),
    "metadata": (),
    "cache_control": (),
    "service_tier": _TIERS,
}
_CHAT_HINTS: Final = _HINTS | {
    "verbosity": (),
    "prediction": (),
    "store": (False,),
    "moderation": (),
    "thinking_token_budget": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
}
_RESPONSES_HINTS: Final = _HINTS | {
    "stream_options": (),
    "max_tool_calls": (),
    "client_metadata": (),
    "context_management": (),
    "moderation": (),
}
_ANTHROPIC_HINTS: Final = _HINTS | {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "betas": ([],),
    "speed": ("standard",),
    "inference_geo": (),
    "diagnostics": (),
}
_GUIDED: Final = {
    name: FieldRefusal(
        f"it was removed from vLLM; use structured_outputs.{name.removeprefix('guided_')}"
    )
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
}
_BEST_OF: Final = {"best_of": FieldRefusal("ask for n answers and choose among them", (1,))}
_CHAT_REFUSED: Final = {
    "modalities": FieldRefusal('answers are text; use ["text"], or remove it', (["text"],)),
    "audio": FieldRefusal("answers are text; remove it"),
    "web_search_options": FieldRefusal(
        "there is no web search here; offer a function that searches"
    ),
    "functions": FieldRefusal("use tools"),
    "function_call": FieldRefusal("use tool_choice"),
    **_GUIDED,
    **_BEST_OF,
}
_RESPONSES_REFUSED: Final = {
    "conversation": FieldRefusal(
        "conversations are not kept; use previous_response_id, or send input"
    ),
}
_TASK: Final = "task"
"""In Jina's API: what a text is embedded for."""
_OLLAMA_HINTS: Final[dict[str, tuple[object, ...]]] = {"keep_alive": (), "shift": ()}
_OLLAMA: Final[dict[str, type[msgspec.Struct]]] = {
    "/api/chat": ChatBody,
    "/api/generate": GenerateBody,
    "/api/embed": EmbedBody,
    "/api/embeddings": EmbeddingsBody,
}


def check(
    path: str,
    body: Mapping[str, msgspec.Raw],
    *,
    strict: bool,
    reasons: bool = True,
    embedding_task: str = "",
) -> Checked:
    """What of `body`, the decoded body of a POST to `path`, is ignored and rewritten.

    `reasons` says whether its model thinks before it answers, `embedding_task` which of several
    tasks it embeds for. Raises `BadRequest`, with `param`, for what would change the answer, and
    under `strict` for what is not known.
    """
    rules = table().get(path)
    if rules is None:
        return Checked((), None, flex=False)
    ignored: list[str] = []
    dropped: list[str] = []
    for name, raw in body.items():
        if name in rules.not_null and _is_null(raw):
            dropped.append(name)
        elif name in rules.hints:
            if not _is_one_of(raw, rules.hints[name]):
                ignored.append(name)
            if name == "thinking_token_budget":  # vLLM refuses it where nothing can obey it
                dropped.append(name)
        elif name in rules.refused:
            refusal = rules.refused[name]
            if not _is_one_of(raw, refusal.allowed):
                raise BadRequest(
                    f"{name}: not supported: {refusal.remedy}", name, "unsupported_field"
                )
        elif name == _TASK and embedding_task and name not in rules.obeyed:
            if not _is_one_of(raw, (embedding_task,)):
                raise BadRequest(
                    f"{name}: this model embeds for {embedding_task}; ask for the model that "
                    "embeds for another task, if there is one, or remove it",
                    name,
                    "unsupported_field",
                )
        elif name not in rules.obeyed:
            if strict:
                raise _unknown(name, rules)
            ignored.append(name)
    changed = Body(body, ignored)
    for name in dropped:
        changed.drop(name)
    if (rewrite := rewrites.OF_PATH.get(path)) is not None:
        rewrite(changed, reasons)
    flex = "service_tier" in body and bytes(body["service_tier"]) == _FLEX
    return Checked(_names(ignored), changed.fields if changed.is_new else None, flex)


def _is_null(raw: msgspec.Raw) -> bool:
    view = memoryview(raw)
    return view.nbytes == len(_NULL) and bytes(view) == _NULL


def _is_one_of(raw: msgspec.Raw, values: tuple[object, ...]) -> bool:
    """Whether it is null or one of `values`."""
    if _is_null(raw) or not values:
        return _is_null(raw)
    try:
        return msgspec.json.decode(raw) in values
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _unknown(name: str, rules: Rules) -> BadRequest:
    shown = name if _NAME.fullmatch(name) else ascii(name[:64])
    close = nearest(name[:64], sorted(rules.known))
    remedy = close if close.startswith("did you mean") else "remove it"
    return BadRequest(
        f"{shown}: unknown field, and api.strict is set: {remedy}", shown, "unknown_field"
    )


def _names(ignored: Iterable[str]) -> tuple[str, ...]:
    """Each once. A name that no header may hold is not shown."""
    return tuple(dict.fromkeys(name if _NAME.fullmatch(name) else "?" for name in ignored))


# --- the table -----------------------------------------------------------------------------------


@cache
def table() -> dict[str, Rules]:
    """The rules of every endpoint that takes a body, by path."""
    rules = {path: _rules(path, models) for path, models in request_models().items()}
    for path, kind in _OLLAMA.items():
        named = frozenset(kind.__struct_encode_fields__)
        hints = {name: said for name, said in _OLLAMA_HINTS.items() if name in named}
        rules[path] = Rules(named - hints.keys(), hints)
    return rules


def ollama_bodies() -> Mapping[str, type[msgspec.Struct]]:
    """Ours, by path."""
    return _OLLAMA


def request_models() -> dict[str, tuple[type[BaseModel], ...]]:
    """vLLM's request models by the path of their POST; several where a body may be one of them."""
    return {
        route.path: tuple(_models(route.body_field.field_info.annotation))
        for route in routes()
        if route.body_field is not None
    }


def routes() -> Iterator[APIRoute]:
    """vLLM's routes that have to do with requests for models, and ours among them."""
    routers = [import_module(f"vllm.entrypoints.{name}.api_router").router for name in _ROUTERS]
    for router in (*routers, input_tokens.router):
        yield from (route for route in router.routes if isinstance(route, APIRoute))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if get_origin(annotation) is Annotated:
        yield from _models(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for one in get_args(annotation):
            yield from _models(one)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation


def _rules(path: str, models: tuple[type[BaseModel], ...]) -> Rules:
    fields: dict[str, FieldInfo] = {}
    for model in models:
        for name, about in model.model_fields.items():
            fields[about.alias or name] = about
    ours = set[str]()
    hints, refused = _HINTS, dict[str, FieldRefusal]()
    if path.startswith("/v1/chat/completions"):
        hints, refused = _CHAT_HINTS, _CHAT_REFUSED
    elif path.startswith("/v1/completions"):
        hints, refused = _CHAT_HINTS, _GUIDED | _BEST_OF
    elif path.startswith("/v1/responses"):
        hints, refused = _RESPONSES_HINTS, _RESPONSES_REFUSED
    elif path.startswith("/v1/messages"):
        hints, ours = _ANTHROPIC_HINTS, {"output_format"}
        if path.endswith("count_tokens"):  # other fields change no count
            hints = hints | dict.fromkeys(
                ("max_tokens", "stream", "temperature", "stop_sequences"), ()
            )
    if path == "/v1/responses":  # repeated in the answer, which is their only use
        hints = {name: said for name, said in hints.items() if name not in ("metadata", "user")}
    return Rules(
        obeyed=frozenset(fields.keys() | ours) - hints.keys() - refused.keys(),
        hints=hints,
        refused={name: said for name, said in refused.items() if name not in fields},
        not_null=frozenset(
            name
            for name, about in fields.items()
            if not about.is_required()
            and about.annotation is not Any
            and type(None) not in get_args(about.annotation)
        ),
    )
