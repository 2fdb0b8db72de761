"""A call: one HTTP request, or one line of a batch, while a front end answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, Final

from appliance.frontend.sound.chats import ChatSound
from appliance.frontend.sound.forms import Form
from appliance.service.front_frames import Refused
from appliance.vocabulary import ModelName, RequestClass, RequestId

REQUEST_HEADER: Final = "x-appliance-request"
"""What `/api/requests`, spans and events know an answer by: there before its first token."""


class Call:
    """What the core said of a call, and what the call asked of the core."""

    one_by_one = False
    """Whether a parser of its tools reads streams one token at a time."""

    def __init__(
        self,
        number: int,
        models: tuple[ModelName, ...] | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        key: str | None = None,
    ) -> None:
        """`models` are those that its `key` allows; None: all of them. `headers` go into its
        answer."""
        self.number = number
        self.key = key
        self.models = None if models is None else frozenset(models)
        self.headers = list(headers)
        self.request_class = RequestClass.INTERACTIVE
        self.pooled_bytes = 0
        """Of all vectors that its requests give."""
        self.listed_tokens = 0
        """Tokens that its requests list to end at, to prefer or to forbid."""
        self.images: dict[int, str] = {}
        """The names of those that may be decoded for it (`appliance.frontend.images`)."""
        self.fetched: dict[int, bytes] = {}
        """The files of those that were named by URL."""
        self.chat_sounds: tuple[ChatSound, ...] = ()
        """Those that its messages have."""
        self.sounds: dict[int, str] = {}
        """The names of those that may be decoded for it (`appliance.frontend.sound.chats`)."""
        self.samples: dict[int, int] = {}
        """How many those have that were decoded, by the same keys."""
        self.keep: Callable[[int], None] = lambda size_bytes: None
        """Counts what is kept of it besides its body. Raises `BodiesFull`."""
        self.image_work: set[Future[Any]] = set()
        """What threads do with them, and no cancelled call can stop once it has begun."""
        self.form: Form | None = None
        """What was sent with a sound."""
        self.parts = asyncio.Lock()
        """Held by the part of a long sound that the core computes, or decides about."""
        self.on_submit: Callable[[], None] = lambda: None
        """Called whenever a request of it is submitted."""
        self.requests: set[RequestId] = set()
        """Those that the core computes, or decides about."""
        self.states: dict[RequestId, Any] = {}
        """vLLM's states of its requests, until the call is over."""
        self.unsettled: set[RequestId] = set()
        """Those that a stop string ended, and that the core has not counted yet."""
        self._settled = asyncio.Event()
        self._submitted = False
        self.refusal: Refused | None = None
        """The first refusal of a request of the call."""
        self.timing: str | None = None
        """The ``Server-Timing`` of the request that ended last."""
        self.background: set[asyncio.Task[None]] = set()
        """Work that goes on after the answer; the call is over when it is done."""
        self.stored: dict[str, dict[str, Any]] = {}
        """What vLLM keeps of responses, by kind and by id (`appliance.frontend.serving.stored`)."""
        self.streams = False
        """Whether its answer is a stream that has begun to be made."""
        self.given_up = asyncio.Event()
        """Set when the core gives up a request of a stream that it had admitted."""
        self.decided = asyncio.Event()
        """Set when the core has admitted or refused a request of the call."""

    def submit(self, request: RequestId) -> None:
        """The core is asked to compute `request`; the answer names the first one."""
        if not self._submitted:
            self._submitted = True
            self.headers.append((REQUEST_HEADER, request))
        self.requests.add(request)
        self.on_submit()

    def settle(self, request: RequestId) -> None:
        """The core has counted a request that a stop string ended."""
        self.unsettled.discard(request)
        if not self.unsettled:
            self._settled.set()

    async def until_settled(self) -> None:
        """Until the core has counted all of those."""
        while self.unsettled:
            self._settled.clear()
            await self._settled.wait()

    def refuse(self, refusal: Refused) -> None:
        """Keep the first refusal, and say that the core has decided."""
        if self.refusal is None:
            self.refusal = refusal
        self.decided.set()

    def allows(self, model: ModelName) -> bool:
        """Whether its key may ask `model`."""
        return self.models is None or model in self.models


current: Final[ContextVar[Call]] = ContextVar("call")
"""The call that is answered here; set before any route handler runs."""
