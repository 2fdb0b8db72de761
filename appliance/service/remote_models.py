"""Models of other servers, which are in the catalogue and whose requests are passed on.

They take nothing of this box but connections: no policy knows of them, and no worker.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from appliance.service.front_frames import FrontModel
from appliance.service.interface import (
    GenerationFailed,
    Load,
    ModelActivity,
    ModelCard,
    ModelNotFound,
    ModelQueueFull,
    shutting_down,
)
from appliance.vocabulary import ModelName, Task

STATE: Final = "remote"
"""What clients and operators are shown in place of a residency."""
OWNER: Final = "remote"
RETRY_SECONDS: Final = 1.0


class RemoteModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of another server, and how that is asked."""

    name: ModelName
    aliases: tuple[ModelName, ...] = ()
    address: str
    """What the path of an endpoint is put behind: ``http://192.0.2.9:8000/v1``."""
    called: str
    """Its name there."""
    key: str = ""
    """What the server wants; no log and no answer has it."""
    connect_seconds: float = 5.0
    silence_seconds: float = 300.0
    max_context: int
    max_queue: int = 256
    task: Task = Task.GENERATE
    created: int
    """Unix time in seconds."""

    def __repr__(self) -> str:
        return f"RemoteModel({self.name!r}, {self.address!r})"

    @property
    def front(self) -> FrontModel:
        """As front ends need it."""
        return FrontModel(
            name=self.name,
            path="",
            dtype="",
            max_context=self.max_context,
            max_batch=1,
            task=self.task,
            created=self.created,
            aliases=self.aliases,
            remote=self.called,
        )


class RemoteModels:
    """Those of the catalogue, and their requests. Used on one event loop."""

    def __init__(self, models: Iterable[RemoteModel] = ()) -> None:
        self.on_change: Callable[[], None] = _ignore
        """Called when there are others."""
        self.on_waited_enough: Callable[[], None] = _ignore
        """Called when the appliance ends, and waits no longer for what other servers answer."""
        self._models = {model.name: model for model in models}
        self._live: Counter[ModelName] = Counter()
        self._output: Counter[ModelName] = Counter()
        """Tokens since the start."""
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def change(self, models: Iterable[RemoteModel]) -> None:
        """There are these from now on; requests that were begun go on."""
        changed = {model.name: model for model in models}
        if changed != self._models:
            self._models = changed
            self.on_change()

    def front(self) -> tuple[FrontModel, ...]:
        """As front ends need them."""
        return tuple(model.front for model in self._models.values())

    def names(self) -> tuple[ModelName, ...]:
        """All by which requests may ask."""
        return tuple(name for one in self._models.values() for name in (one.name, *one.aliases))

    def own_names(self) -> tuple[ModelName, ...]:
        """Without aliases."""
        return tuple(self._models)

    def find(self, name: ModelName) -> RemoteModel | None:
        """The model of this name or alias."""
        found = self._models.get(name)
        others = (one for one in self._models.values() if name in one.aliases)
        return found or next(others, None)

    def check_here(self, name: ModelName) -> None:
        """Raises `GenerationFailed` if an operator asks of a model of another server what only one
        of this box can have done."""
        if (found := self.find(name)) is not None:
            raise GenerationFailed(
                "remote_model",
                f"{found.name} is a model of another server: it is neither loaded nor changed "
                "here; ask that server, or change its table in the configuration and reload",
                409,
            )

    # --- requests --------------------------------------------------------------------------------

    def begin(self, name: ModelName) -> RemoteModel:
        """Another request, whose `end` is due later. Raises `ModelNotFound`, `ModelQueueFull`, and
        `GenerationFailed` when the appliance ends."""
        model = self._models.get(name)
        if model is None:
            raise ModelNotFound(name)
        if self._draining:
            raise shutting_down()
        if self._live[name] >= model.max_queue:
            raise ModelQueueFull(RETRY_SECONDS, name)
        self._live[name] += 1
        self._idle.clear()
        return model

    def end(self, name: ModelName, output_tokens: int = 0) -> None:
        """A request is over that gave so many tokens."""
        self._live[name] -= 1
        self._output[name] += output_tokens
        if not self._live.total():
            self._idle.set()

    def live(self, name: ModelName) -> int:
        """How many of its requests are not over."""
        return self._live[name]

    async def drain(self) -> None:
        """Take no more; ends when none is live."""
        self._draining = True
        await self._idle.wait()

    # --- what is shown ---------------------------------------------------------------------------

    def cards(self) -> Iterator[ModelCard]:
        """As clients see them, also by their aliases."""
        for model in self._models.values():
            card = ModelCard(
                id=model.name,
                created=model.created,
                max_context_tokens=model.max_context,
                owned_by=OWNER,
                state=STATE,
                task=model.task,
            )
            yield card
            for alias in model.aliases:
                yield msgspec.structs.replace(card, id=alias, root=model.name)

    def card(self, name: ModelName) -> ModelCard | None:
        """That of a name or an alias, if it is one of these."""
        return next((card for card in self.cards() if card.id == name), None)

    def activity(self, name: ModelName) -> ModelActivity | None:
        return next((one for one in self.activities() if one.model == name), None)

    def listed_in(self, load: Load) -> Load:
        """What routers are sent, with these names. They are never resident: no box is nearer to
        them than another."""
        if not self._models:
            return load
        catalogue = (*load.catalogue, *self.names())
        version = Load.version_of(catalogue, load.resident)
        return msgspec.structs.replace(load, catalogue=catalogue, version=version)

    def activities(self) -> tuple[ModelActivity, ...]:
        return tuple(
            ModelActivity(
                model=name,
                state=STATE,
                running=self._live[name],
                output_tokens=self._output[name],
            )
            for name in self._models
        )


def _ignore() -> None:
    pass
