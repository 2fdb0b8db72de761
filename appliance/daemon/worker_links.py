"""Sends workers the commands of the machine, and what they need to know of a request before it."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.observability.metrics import Metrics
from appliance.service.generation import RequestStream
from appliance.vocabulary import (
    Command,
    Direction,
    InstanceId,
    ModelName,
    MoveKv,
    Release,
    RequestId,
    RunPrefill,
    RunTurn,
)
from appliance.worker import frames
from appliance.worker.process import WorkerProcess


class WorkerLinks:
    """Which requests each worker knows. A command costs O(requests it names)."""

    def __init__(
        self,
        workers: Mapping[InstanceId, WorkerProcess],
        streams: Mapping[RequestId, RequestStream],
        metrics: Metrics,
    ) -> None:
        """`streams` are the live requests."""
        self._workers = workers
        self._streams = streams
        self._metrics = metrics
        self._known: dict[InstanceId, set[RequestId]] = {}

    def began(self, instance: InstanceId) -> None:
        """The instance's worker is new, or gone: it knows no request."""
        self._known[instance] = set()

    def produced(self, message: frames.Tokens) -> None:
        """The worker has forgotten the requests whose last token it produced."""
        known = self._known[message.instance]
        for produced in message.produced:
            if produced.finished is not None:
                known.discard(produced.request)

    def send(self, instance: InstanceId, message: frames.Down) -> None:
        """Send a worker something that is no command."""
        self._workers[instance].send(message)

    def perform(self, command: Command) -> None:
        """Send a command to its worker, after the requests that it names."""
        match command:
            case RunPrefill():
                self._introduce_prompt(command.instance, command.model, command.request)
            case RunTurn():
                for prompt in command.prompts:
                    self._introduce_prompt(command.instance, command.model, prompt)
            case MoveKv(direction=Direction.IN):
                for move in command.moves:
                    self._introduce(command.instance, move.request)
            case Release():
                self._known[command.instance].discard(command.request)
        self._workers[command.instance].send(command)  # type: ignore[attr-defined,arg-type]

    def _introduce(self, instance: InstanceId, request: RequestId) -> None:
        """Make sure the worker knows the request, with every token it has so far."""
        if request not in self._known[instance]:
            self._known[instance].add(request)
            sequence = self._streams[request].sequence()
            self._workers[instance].send(frames.AddSequence(sequence))

    def _introduce_prompt(self, instance: InstanceId, model: ModelName, request: RequestId) -> None:
        """The worker is about to compute a prompt, and the output that others produced of it."""
        self._introduce(instance, request)
        if self._streams[request].output:
            self._metrics.recovery(model)
