"""`appliance fleet apply`: takes the steps of a plan at the boxes, in order, until one refuses.

What is there already is left as it is, so that a plan can be applied again. A box gives a model up
only when another one that has it is ready to serve it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from shlex import quote as quote_word
from typing import Any, Final
from urllib.parse import quote

import httpx
import msgspec

from appliance.checkpoints.pull import folder_name
from appliance.errors import FleetError
from appliance.fleet.observed import Hold, PlanFile
from appliance.fleet.placement import Step
from appliance.vocabulary import ModelName

READY_STATES: Final = frozenset({"cold", "loading", "loaded"})
"""Of a model with an engine: it serves as soon as its weights are on a device."""
POLL_SECONDS: Final = 0.2
CONNECT_SECONDS: Final = 10.0
SILENCE_SECONDS: Final = 600.0
"""How long a box that pulls may say nothing, as while it verifies, at least."""


class Refusal(FleetError):
    """A box answers with an error; `field` is what it finds wrong, if it says so."""

    def __init__(self, message: str, status: int, field: str) -> None:
        super().__init__(message)
        self.lacks_files = status == httpx.codes.UNPROCESSABLE_ENTITY and field.endswith(".path")
        """Whether there is no checkpoint where it was asked to serve one from."""


class Catalog(msgspec.Struct, frozen=True):
    """As much of the table of a box's configuration."""

    folder: str = ""
    peers: tuple[str, ...] = ()


class Boxes:
    """The boxes of a plan, over HTTP. Refusals are `FleetError`, which names the box."""

    def __init__(self, client: httpx.Client, urls: Mapping[str, str]) -> None:
        self._client = client
        self._urls = urls

    def names(self) -> tuple[str, ...]:
        return tuple(self._urls)

    def find(self, box: str, model: ModelName) -> dict[str, Any] | None:
        """What the model does on the box; None if the box does not serve it. One that is being
        removed is as good as gone."""
        response = self._send("GET", box, _path(model))
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        found: dict[str, Any] = self._checked(box, response)
        return None if found["state"] == "removing" else found

    def call(self, method: str, box: str, path: str, body: object = None) -> None:
        self._checked(box, self._send(method, box, path, body))

    def url(self, box: str) -> str:
        return self._urls[box]

    def catalog(self, box: str) -> Catalog:
        config = self._checked(box, self._send("GET", box, "/api/config"))["config"]
        return msgspec.convert(config["catalog"], Catalog)

    def pull(self, box: str, model: ModelName, url: str, silence_seconds: float) -> str:
        """Have a box pull a model from the one at `url`; where it is then."""
        body = {"model": model, "from": url, "add": False}
        timeout = httpx.Timeout(silence_seconds, connect=CONNECT_SECONDS)
        last: dict[str, Any] = {}
        try:
            with self._client.stream(
                "POST", f"{self._urls[box]}/api/pull", json=body, timeout=timeout
            ) as response:
                for line in response.iter_lines():
                    last = msgspec.json.decode(line)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            raise FleetError(
                f"{box} broke off its pull of {model} ({error}); apply the plan again to go on"
            ) from error
        if "path" not in last:
            raise FleetError(f"{box} cannot pull {model} from {url}: {_message(last)}")
        return str(last["path"])

    def _send(self, method: str, box: str, path: str, body: object = None) -> httpx.Response:
        try:
            return self._client.request(method, f"{self._urls[box]}{path}", json=body)
        except KeyError:
            raise FleetError(f"{box}: the plan has no URL of it; make the plan anew") from None
        except httpx.HTTPError as error:
            raise FleetError(f"{box}: no answer ({error})") from error

    def _checked(self, box: str, response: httpx.Response) -> Any:
        try:
            answer = response.json()
            if response.is_success:
                return answer
            message, field = answer["error"]["message"], answer["error"].get("param")
        except (ValueError, KeyError, TypeError):
            message, field = f"{response.request.url.path} answered {response.status_code}", None
        raise Refusal(f"{box} refuses: {message}", response.status_code, field or "")


def apply(
    file: PlanFile,
    boxes: Boxes,
    say: Callable[[str], None],
    patience_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Take all steps, and say what was done for each; how many changed something. Waits so long at
    most for a model to be ready, or for its requests to end. Raises `FleetError` at the first
    refusal: the steps before it are taken, and applying the plan again goes on from there."""
    taken = 0
    for number, step in enumerate(file.steps, 1):
        applied = _Applied(file, boxes, say, patience_seconds, clock)
        try:
            done = applied.take(step)
        except FleetError as error:
            raise FleetError(f"step {number}, {step.kind} of {step.model}: {error}") from error
        say(f"{number}. {step.model}: " + ("; ".join(done) or "as planned already"))
        taken += bool(done)
    return taken


class _Applied:
    """One step at the boxes."""

    def __init__(
        self,
        file: PlanFile,
        boxes: Boxes,
        say: Callable[[str], None],
        patience_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._file = file
        self._boxes = boxes
        self._say = say
        self._patience = patience_seconds
        self._clock = clock
        self._until = clock() + patience_seconds

    def take(self, step: Step) -> list[str]:
        """What was done, in words; nothing if nothing was to do."""
        pins = self._file.hold is Hold.PINS
        done: list[str] = []
        if step.target is not None:
            done += self._pin(step.target, step.model) if pins else self._add(step)
        if step.source is not None:
            done += self._unpin(step) if pins else self._remove(step)
        return done

    def _add(self, step: Step) -> list[str]:
        target, model = str(step.target), step.model
        done = []
        if self._boxes.find(target, model) is None:
            table = self._file.tables.get(model)
            if table is None:
                raise FleetError(f"the plan has no table of {model}: make the plan anew")
            done += self._serve(target, model, dict(table))
        self._await(lambda: self._ready(target, model), f"{model} is not ready on {target}")
        return done

    def _serve(self, target: str, model: ModelName, table: dict[str, Any]) -> list[str]:
        """From where the plan says, else from where the box has, or puts, what it pulls."""
        if (refusal := self._refused(target, table)) is None:
            return [f"{target} serves it"]
        missing = str(table["path"])
        if folder := self._boxes.catalog(target).folder:
            table["path"] = f"{folder}/{folder_name(model)}"
            if self._refused(target, table) is None:
                return [f"{target} serves it, from its folder of models"]
        table["path"] = self._pulled(target, model, missing, refusal)
        self._boxes.call("POST", target, "/api/models", table)
        return [f"{target} pulled its files, and serves it"]

    def _refused(self, target: str, table: dict[str, Any]) -> Refusal | None:
        """The answer of a box that has no checkpoint where a model is to be served from. Raises
        `Refusal` for all others."""
        try:
            self._boxes.call("POST", target, "/api/models", table)
        except Refusal as refusal:
            if refusal.lacks_files:
                return refusal
            raise
        return None

    def _pulled(self, target: str, model: ModelName, missing: str, otherwise: Refusal) -> str:
        """The place of a model's files on a box that lacked them. Raises `FleetError` if it may not
        pull them from another box, with the command that does so."""
        others = [box for box in self._boxes.names() if box != target]
        having = next((box for box in others if self._boxes.find(box, model) is not None), None)
        if having is None:
            raise otherwise
        url, catalog = self._boxes.url(having), self._boxes.catalog(target)
        if not catalog.folder:
            raise FleetError(
                f"{target} has no files of {model} in {missing}, and no folder for models: set"
                " catalog.folder in its configuration, restart it, and apply the plan again"
            )
        if url.rstrip("/") in [peer.rstrip("/") for peer in catalog.peers]:
            self._say(f"{target} pulls {model} from {having}")
            return self._boxes.pull(target, model, url, max(self._patience, SILENCE_SECONDS))
        raise FleetError(
            f"{target} has no files of {model}, neither in {missing} nor in"
            f" {catalog.folder}/{folder_name(model)}: run"
            f" `appliance pull {quote_word(model)} --from {url} --no-add` on its machine, with a"
            f" key for {having} in $APPLIANCE_API_KEY, and apply the plan again; or add {url} to"
            " catalog.peers of its configuration"
        )

    def _ready(self, box: str, model: ModelName) -> bool:
        """Raises `FleetError` if it never will be."""
        found = self._boxes.find(box, model)
        if found is None or found["state"] == "failed":
            reason = "it was removed" if found is None else found["failure"]
            raise FleetError(f"{model} cannot be served on {box}: {reason}")
        return found["state"] in READY_STATES and not found["draining"]

    def _remove(self, step: Step) -> list[str]:
        source, model = str(step.source), step.model
        found = self._boxes.find(source, model)
        if found is None:
            return []
        others = [box for box in self._boxes.names() if box != source]
        if not any([self._is_ready(box, model) for box in others]):
            raise FleetError(
                f"no other box of the plan is ready to serve {model}, so {source} keeps it; add it"
                " elsewhere first, or make the plan anew"
            )
        if not found["draining"]:
            self._boxes.call("POST", source, f"{_path(model)}/drain")
        self._await(
            lambda: self._is_drained(source, model), f"requests of {model} go on on {source}"
        )
        self._boxes.call("DELETE", source, f"{_path(model)}?force=false&files=false")
        return [f"{source} serves it no more; its files stay"]

    def _is_ready(self, box: str, model: ModelName) -> bool:
        found = self._boxes.find(box, model)
        return found is not None and found["state"] in READY_STATES and not found["draining"]

    def _is_drained(self, box: str, model: ModelName) -> bool:
        found = self._boxes.find(box, model)
        return found is None or not found["running"] + found["waiting"]

    def _pin(self, box: str, model: ModelName) -> list[str]:
        found = self._boxes.find(box, model)
        if found is None:
            raise FleetError(f"{box} does not serve {model}; make the plan anew")
        if found["terms"]["pinned"]:
            return []
        self._boxes.call("POST", box, f"{_path(model)}/pin")
        return [f"{box} keeps its weights in the host cache"]

    def _unpin(self, step: Step) -> list[str]:
        source, model = str(step.source), step.model
        found = self._boxes.find(source, model)
        if found is None or not found["terms"]["pinned"]:
            return []
        self._boxes.call("POST", source, f"{_path(model)}/unpin")
        return [f"its weights may leave the host cache of {source}"]

    def _await(self, is_so: Callable[[], bool], otherwise: str) -> None:
        while not is_so():
            if self._clock() >= self._until:
                raise FleetError(f"{otherwise}; apply the plan again to go on waiting")
            time.sleep(POLL_SECONDS)  # no event of a box tells of it


def _message(line: dict[str, Any]) -> str:
    """What the last line of a pull, or an error in its place, says."""
    error = line.get("error", "it said nothing")
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _path(model: ModelName) -> str:
    return f"/api/models/{quote(model)}"
