"""Which requests an instance of the lab knows: those that were neither released nor have ended."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.lab.sim.recorder import Life
from appliance.vocabulary import Command, Direction, MoveKv, RequestId, RunPrefill, RunTurn


class KnownRequests:
    """`lives` are the truths about the requests that have not ended, shared by all instances."""

    def __init__(self, lives: Mapping[RequestId, Life]) -> None:
        self.released: set[RequestId] = set()
        """Released, and in no command since."""
        self._lives = lives

    def take_in(self, command: Command) -> None:
        """A command of a request that was released once is of its new life."""
        if not self.released:
            return
        if isinstance(command, RunPrefill):
            self.released.discard(command.request)
        elif isinstance(command, RunTurn):
            self.released.difference_update(command.prompts)
        elif isinstance(command, MoveKv) and command.direction is Direction.IN:
            self.released.difference_update(move.request for move in command.moves)

    def find(self, request: RequestId) -> Life | None:
        """The request, unless it ended or was released."""
        life = self._lives.get(request)
        if life is None or not life.remaining_tokens or request in self.released:
            return None
        return life
