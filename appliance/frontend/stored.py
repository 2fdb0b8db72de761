"""Responses that clients may ask for again: a bounded store, of this process alone.

vLLM keeps them in dicts of each model's serving object, and for ever. Here the oldest go. What one
front end keeps the others do not know: a client that needs its stored responses keeps its
connection, or sends the conversation with each request.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from appliance.frontend.calls import current
from appliance.vocabulary import ModelName

MAX_RESPONSES: Final = 4096
MAX_BYTES: Final = 64 * 1024 * 1024
"""Of the requests that the responses answer."""
EACH_BYTES: Final = 16 * 1024
"""Charged for a response itself."""


class _Kept(dict[str, Any]):
    """One of vLLM's dicts by a response's id."""

    def __init__(self, store: StoredResponses, model: ModelName) -> None:
        super().__init__()
        self._store = store
        self._model = model

    def __setitem__(self, response: str, value: Any) -> None:
        super().__setitem__(response, value)
        self._store.keep(response, self._model, self)


class _Background(dict[str, Any]):
    """Tasks of responses that are made after their answer; their calls last as long."""

    def __setitem__(self, response: str, task: Any) -> None:
        super().__setitem__(response, task)
        current.get().background.add(task)


class StoredResponses:
    """Which responses are kept, and of which model they are."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[ModelName, int, list[_Kept]]] = OrderedDict()
        self._bytes = 0

    def serve(self, serving: Any) -> None:
        """Have a model's serving object keep its responses here; None: it makes none."""
        if serving is None:
            return
        model = serving.models.model_name()
        serving.response_store = _Kept(self, model)
        serving.msg_store = _Kept(self, model)
        serving.event_store = _Kept(self, model)
        serving.background_tasks = _Background()

    def model_of(self, response: str) -> ModelName | None:
        """The model that made a response; None: it is not known here."""
        known = self._known.get(response)
        return None if known is None else known[0]

    def keep(self, response: str, model: ModelName, where: _Kept) -> None:
        """A response is kept in `where`; the oldest may have to go."""
        if response not in self._known:
            call = current.get(None)
            size = EACH_BYTES + (0 if call is None else call.body_bytes)
            self._known[response] = (model, size, [])
            self._bytes += size
        places = self._known[response][2]
        if all(place is not where for place in places):
            places.append(where)
        while self._bytes > MAX_BYTES or len(self._known) > MAX_RESPONSES:
            oldest, (_, size, kept) = self._known.popitem(last=False)
            self._bytes -= size
            for place in kept:
                place.pop(oldest, None)
