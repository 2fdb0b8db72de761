"""Frames between the core and a front end: a length, then one msgpack object. No pickle.

A front end turns HTTP into token ids and back; the core keeps keys, limits and the machine. Both
ends are one version of this package: another `VERSION` in `Welcome` ends the front end.

Frames of one direction keep their order. A *call* is one HTTP request (or one line of a batch), a
*request* is one sequence of it, known by the id that the engine, `/api/requests` and the log use.

    front end                                      core
    Hello                          ->
                                   <-  Welcome, later Catalogue at every change
    Enter(call)                    ->
                                   <-  Entered(call) or Refused(call)
    Submit(call, request)          ->
                                   <-  Admitted(request) or Refused(call, request)
                                   <-  Outputs(request, ...), at last one that is finished,
                                       or Refused(call, request)
    Abort, Reading                 ->
    Stopped(call, request)         ->
                                   <-  Settled(call, request)
    KeepResponse, KeepEvent        ->
    FindResponse(call)             ->
                                   <-  FoundResponse(call)
    FetchImage(call)               ->
                                   <-  FetchedImage(call)
    TookImage                      ->  if there is a file
    Forward(call)                  ->  of a model of another server
                                   <-  Passed(call), piece by piece
    TookPiece(call)                ->  after each but the last
    Leave(call)                    ->
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from appliance import framing
from appliance.checkpoints.task import PoolerValue, pools_tokens
from appliance.vocabulary import FinishReason, ModelName, RequestClass, RequestId, Task

VERSION: Final = 7


# --- from the core to a front end ----------------------------------------------------------------


class FrontModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model as a front end needs it to render prompts and to parse answers."""

    name: ModelName
    path: str
    dtype: str
    max_context: int
    max_batch: int
    task: Task
    created: int
    """Unix time in seconds."""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    """vLLM's names."""
    tool_parser_is_auto: bool = False
    """Whether `auto` chose it: it is left out where the tokenizer refuses it."""
    aliases: tuple[ModelName, ...] = ()
    """What clients may call it besides its name."""
    max_logprobs: int = 20
    return_tokens_as_token_ids: bool = False
    pooler_config: dict[str, PoolerValue] = {}
    """Keys of vLLM's `PoolerConfig` that are not as the checkpoint has them. Of a model that pools,
    `task` is one of them."""

    embedding_task: str = ""
    """Of several tasks that its checkpoint has adapters for, the one that it embeds for."""
    images: int = 0
    """The most of a prompt; 0: it reads none."""
    sounds: int = 0
    """The most of a chat's prompt; 0: it reads none there."""
    adapters: tuple[ModelName, ...] = ()
    """What clients call the model with each of its LoRA adapters: their names begin with its."""
    takes_adapters: bool = False
    """Whether it has some, or may have."""
    base: ModelName = ""
    """In a front end: the model that this one, which has an adapter, is computed with."""
    remote: str = ""
    """What another server calls it, which computes it; "": it is computed here."""

    @property
    def pools_tokens(self) -> bool:
        """Whether it gives a vector, or classes, for each token of a prompt."""
        return pools_tokens(str(self.pooler_config.get("task", "")))


class Welcome(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first frame down: all that a front end is configured with."""

    version: int = VERSION
    keep_alive_seconds: float
    """An open stream without news gets a comment after so long."""
    max_body_bytes: int
    strict: bool
    """`api.strict`: unknown fields are refused in every dialect."""
    origins: tuple[str, ...]
    """`api.origins`: the origins whose pages may use the API, besides the default ones."""
    root_path: str = ""
    """`api.root_path`: requests below it are meant as those without it."""
    most_in_use: int | None = None
    """Descriptors, when connections without a request are closed; None: what the system allows."""
    max_bodies_bytes: int
    """Bodies of requests that the front end holds at once, together."""
    models: tuple[FrontModel, ...]


class Catalogue(msgspec.Struct, frozen=True, tag=True):
    """All models from now on; what is missing was removed."""

    models: tuple[FrontModel, ...]


class Entered(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The call may go on. `models` are those that its key allows; None: all of them. `headers` go
    into its answer."""

    call: int
    key: str | None = None
    """The name of its key."""
    models: tuple[ModelName, ...] | None = None
    headers: tuple[tuple[str, str], ...] = ()


class Refused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The core refuses a call, or one of its requests, before or after its first token.

    To be answered with `status`, in the dialect's words for errors; `code` is a stable word.
    """

    call: int
    request: RequestId | None = None
    status: int
    code: str
    message: str
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """The request was taken in: it is computed, or waits for its turn."""

    request: RequestId


class Output(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one request, oldest first; tokens that wait are sent together.

    `details` are engine outputs that hold more than a token (log probabilities, a pooled vector):
    each is `appliance.engines.vllm.messages`'s encoding of one. A request's output has either
    `tokens` or `details`, which then hold the tokens, too.
    """

    request: RequestId
    tokens: list[int]
    finished: FinishReason | None = None
    details: list[bytes] = []
    timing: str | None = None
    """With `finished`: the ``Server-Timing`` of the request."""


class Settled(msgspec.Struct, frozen=True, tag=True):
    """What the request of a `Stopped` came to is counted: its answer may go on to its client."""

    call: int
    request: RequestId


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What is new since the last frame, of all requests of the front end."""

    outputs: list[Output]


class FoundResponse(msgspec.Struct, frozen=True, tag=True):
    """A stored response and its messages, as a front end sent them; None: the key of the call has
    none of this name."""

    call: int
    answer: bytes | None = None
    messages: bytes | None = None


class FetchedImage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The file of an image, or why it is not fetched."""

    call: int
    file: bytes = b""
    refused: str = ""
    busy: bool = False
    """Whether it is refused for others that are fetched: trying again later makes sense."""


class Passed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A piece of what another server answers; the first one has the `status`. The next one comes
    after `TookPiece`, unless this is the `last`. With `refused` there is none, or no more of it."""

    call: int
    status: int = 0
    streams: bool = False
    """Whether events follow, or one JSON body in pieces."""
    data: bytes = b""
    last: bool = False
    headers: tuple[tuple[str, str], ...] = ()
    refused: Refused | None = None


class Run(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer a line of a batch as if it had come over HTTP, in a call that the core has entered
    already; `Ran` has the same call."""

    call: int
    path: str
    body: bytes
    models: tuple[ModelName, ...] | None = None
    """Those that its key allows; None: all of them."""
    key: str | None = None
    """The name of its key, if it has one."""


class StopRun(msgspec.Struct, frozen=True, tag=True):
    """Give a line of a batch up; no `Ran` is expected."""

    call: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answer at once, from the event loop."""

    number: int


class Drain(msgspec.Struct, frozen=True, tag=True):
    """End when all connections are answered: each answer from now on closes its connection."""


# --- from a front end to the core ----------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first frame up."""

    version: int
    pid: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The front end serves from now on."""


class Enter(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A call begins: may it? `headers` are those that decide it (`DECIDING_HEADERS`)."""

    call: int
    method: str
    path: str
    client: str | None
    """The peer's address; None: unknown."""
    headers: tuple[tuple[str, str], ...]
    connection: int = 0
    """That of the `Handover`: the core knows which connections are an operator's."""


DECIDING_HEADERS: Final = frozenset(
    {"authorization", "x-api-key", "host", "origin", "x-slo", "traceparent"}
)


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Compute one sequence. `body` is the engine's request without its prompt, encoded by
    `appliance.engines.vllm.messages`; the core hands it to a worker unread."""

    call: int
    request: RequestId
    model: ModelName
    asked: ModelName = ""
    """What the client asked for, if the model is computed with one of its adapters."""
    prompt: tuple[int, ...]
    max_tokens: int
    """Of output, at most; 0: the prompt is pooled and nothing follows."""
    body: bytes
    guide: bytes = b""
    """What its output follows, encoded by `appliance.engines.vllm.messages`, if it follows a guide:
    that is compiled before the request is admitted."""
    together_tokens: int = 0
    """Most tokens, prompts included, of all sequences that are asked for at once, if there are
    several: they are taken together or not at all."""
    request_class: RequestClass = RequestClass.INTERACTIVE
    images: tuple[int, ...] = ()
    """Tokens of each image or sound in the prompt, in their order."""
    counts_prompt: bool = True
    """Whether the prompt counts as its input: of several choices of one prompt, that of the first
    does."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """No more tokens are wanted: the client left (`CANCELLED`), or a stop string came (`STOP`)."""

    requests: list[RequestId]
    reason: FinishReason


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """A stop string ended a request; of its output the client is sent so many tokens. `Settled`
    answers; until then the client is not sent the end."""

    call: int
    request: RequestId
    output_tokens: int


class Reading(msgspec.Struct, frozen=True, tag=True):
    """The client of these requests does not read what is sent (backpressure), or reads again."""

    requests: list[RequestId]
    reads: bool


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The call is over; what it still has is aborted."""

    call: int


class KeepResponse(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Store a response for the key of the call, in place of one with this name. The core answers
    what is asked of stored responses."""

    call: int
    response: str
    answer: bytes
    """What the client is sent for it, JSON."""
    messages: bytes
    """The conversation that it answers, JSON, for a request that goes on from there."""
    background: bool = False
    """Whether it is still being made, after its answer; until the call is over it can be
    cancelled."""


class KeepEvent(msgspec.Struct, frozen=True, tag=True):
    """Add an event to a response that is made in the background."""

    call: int
    event: bytes
    """As it is sent to the client."""


class FindResponse(msgspec.Struct, frozen=True, tag=True):
    """A request of the call goes on from a stored response; one at a time."""

    call: int
    response: str


class FetchImage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Fetch an image that a body names by URL, one at a time for a call."""

    call: int
    url: str


class TookImage(msgspec.Struct, frozen=True, tag=True):
    """The file of the last `FetchedImage` is read, whether its call wants it or not."""


class Forward(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Ask another server, one request at a time for a call."""

    call: int
    model: ModelName
    asked: ModelName
    """What the client calls it, which its answer does, too."""
    path: str
    body: bytes
    """As that server is to have it."""
    streams: bool = False
    wants_usage: bool = False
    """Whether the client asked for the usage in a stream."""
    prompt_tokens: int
    """About so many, until the answer says how many."""
    max_tokens: int
    """Of each answer at most; 0: nothing is generated."""
    choices: int = 1
    guided: bool = False
    """Whether it asks for a guide."""
    request_class: RequestClass = RequestClass.INTERACTIVE
    headers: tuple[tuple[str, str], ...] = ()
    """Those of ours that go along. None of them is the client's."""


class TookPiece(msgspec.Struct, frozen=True, tag=True):
    """The client has taken the piece of the last `Passed`, or the connection has room for it."""

    call: int


class Ran(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The answer to a line of a batch."""

    call: int
    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class BodyActivity(msgspec.Struct, frozen=True, kw_only=True):
    """A body of a request that is still coming in."""

    path: str
    key: str | None
    """The name of its key."""
    received_bytes: int
    age_seconds: float
    """Since its request began."""


class Pong(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The event loop turns. `connections` are open ones, `calls` those that are not answered;
    `large` of them have a body of `LARGE_BYTES` or more; `bodies` are some that still come in."""

    number: int
    connections: int
    calls: int
    large: int = 0
    bodies: tuple[BodyActivity, ...] = ()


class ModelRefused(msgspec.Struct, frozen=True, tag=True):
    """The front half of a model cannot be built (its tokenizer is damaged, say)."""

    model: ModelName
    reason: str


Down: TypeAlias = (
    Welcome
    | Catalogue
    | Entered
    | Refused
    | Admitted
    | Settled
    | Outputs
    | FoundResponse
    | FetchedImage
    | Passed
    | Run
    | StopRun
    | Ping
    | Drain
)
Up: TypeAlias = (
    Hello
    | Ready
    | Enter
    | Submit
    | Abort
    | Stopped
    | Reading
    | KeepResponse
    | KeepEvent
    | FindResponse
    | FetchImage
    | TookImage
    | Forward
    | TookPiece
    | Leave
    | Ran
    | Pong
    | ModelRefused
)


class Handover(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Goes with a connection's descriptor, as one message of the handover socket (SEQPACKET).

    From the core to a front end: nothing was read from the connection. Under TLS it is one end of a
    socket pair: the core encrypts. From a front end to the core: a request on the connection is
    the core's. `received` is then what was read of it, at most `MAX_RECEIVED_BYTES`.
    """

    connection: int
    """The core's number of it, from 1."""
    client: tuple[str, int] | None
    server: tuple[str, int] | None
    scheme: str = "http"
    large: bool = False
    """Whether the head of the first request says that its body has `LARGE_BYTES` or more."""
    received: bytes = b""


class StreamBegun(msgspec.Struct, frozen=True, tag=True):
    """From a front end to the core, with a connection's descriptor: the stream that answers a call
    has begun there. Should the front end die before `Leave`, the core sends `ending`, an event that
    says so, and closes the connection."""

    call: int
    ending: bytes


LARGE_BYTES: Final = 1 << 20
"""A body of so many bytes keeps a front end busy: those that have such ones are few, so that others
answer at once."""

MOST_DETAIL_BYTES: Final = framing.MAX_FRAME_BYTES // 2
"""Of all outputs of a frame together. One detail has no more, and a frame holds some bytes else."""

UNFINISHED: Final = frozenset({"queued", "in_progress"})
"""Statuses of a response that is still being made."""

MAX_STORED_BYTES: Final = 16 * 1024 * 1024
"""Of one response, its messages included; a larger one is not stored."""

MAX_TOGETHER_BYTES: Final = 256 * 1024 * 1024
"""Of the prepared images or sounds of all choices of a call: with what else the choices have, less
than the core keeps for one key, or waiting would never help."""

MAX_RECEIVED_BYTES: Final = 128 * 1024
"""A request whose beginning is longer is not given back: its connection is closed."""


# --- with the process that front ends are forked from ---------------------------------------------
# Each is one message of its socket (SEQPACKET).


class Role(StrEnum):
    """What a forked process is for."""

    FRONT_END = "front_end"
    """Gets two descriptors, the frames' and the handover's."""
    GUIDE_COMPILER = "guide_compiler"
    """Gets one descriptor (`appliance.service.guide_frames`)."""


def decoder_for_front() -> framing.Decoder[Down]:
    """For a front end."""
    return framing.Decoder(msgspec.msgpack.Decoder(Down))


def decoder_for_core() -> framing.Decoder[Up]:
    """For the core."""
    return framing.Decoder(msgspec.msgpack.Decoder(Up))
