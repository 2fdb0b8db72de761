"""Files and batches belong to keys, and are carried out in their names."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from appliance.access.admission import Admission
from appliance.access.auth import KEYLESS, Access, Caller
from appliance.access.keys import Key, KeyFile, KeyRing, digest
from appliance.engines.protocol import Produced
from appliance.service.interface import GenerationFailed, QueueFull, RequestTimes, SubmitRequest
from appliance.vocabulary import FinishReason, RequestClass
from tests.unit.api.test_batches import (
    CHATS,
    House,
    begin,
    chat,
    house,
    lines_of,
    over,
    polled,
    until,
)
from tests.unit.doubles.fake_service import FakeGeneration, FakeService

__all__ = ["house"]


@pytest.fixture
def file(house: House) -> KeyFile:
    """Keys of the house: whoever has none is refused."""
    made = KeyFile(house.folder.with_name("keys.json"))
    house.access = Access(KeyRing(made.path), clock=house.clock, wall_clock=house.clock)
    return made


def add(file: KeyFile, name: str, **fields: Any) -> str:
    """A key; its secret."""
    secret = f"sk-{name}"
    file.add(Key(name=name, sha256=digest(secret), created_seconds=0.0, **fields))
    return secret


async def ended(house: House, batch: str) -> None:
    """Returns when a batch is over that nobody may ask for."""

    async def look() -> bool | None:
        found = house.batches.find(batch)
        return True if found is not None and found.over else None

    await polled(look)


async def test_no_key_sees_what_is_anothers(house: House, file: KeyFile) -> None:
    """Neither in lists, nor by its id, nor by making something of it."""
    secrets = [add(file, name) for name in ("alice", "bob")]
    async with house.client() as client:
        alice, bob = (client.with_options(api_key=secret) for secret in secrets)
        batch = await begin(alice, [chat("a")])
        done = await over(alice, batch)
        assert done.output_file_id is not None
        for id in (done.input_file_id, done.output_file_id):
            for asking in (
                bob.files.retrieve(id),
                bob.files.content(id),
                bob.files.delete(id),
                bob.batches.create(input_file_id=id, endpoint=CHATS, completion_window="24h"),
            ):
                with pytest.raises(openai.NotFoundError):
                    await asking
        for asking in (bob.batches.retrieve(batch), bob.batches.cancel(batch)):
            with pytest.raises(openai.NotFoundError):
                await asking
        assert [one.id async for one in bob.files.list()] == []
        assert [one.id async for one in bob.batches.list()] == []
        assert len([one.id async for one in alice.files.list()]) == 2
        with pytest.raises(openai.AuthenticationError):
            await client.batches.list()

    assert {one.request.key for one in house.service.submitted} == {"alice"}


async def test_what_a_key_does_not_allow(house: House, file: KeyFile) -> None:
    """Other models do not exist for it; without the class batch there are no batches."""
    secrets = [
        add(file, "some", models=("org/small",)),
        add(file, "interactive", classes=(RequestClass.INTERACTIVE,)),
        add(file, "nightly", classes=(RequestClass.BATCH,)),
    ]
    async with house.client() as client:
        some, interactive, nightly = (client.with_options(api_key=one) for one in secrets)
        failed = await over(some, await begin(some, [chat("a"), chat("b", model="org/small")]))
        with pytest.raises(openai.PermissionDeniedError, match="no batch work"):
            await begin(interactive, [chat("a")])
        done = await over(nightly, await begin(nightly, [chat("a")]))

    assert failed.status == "failed"
    assert failed.errors is not None
    assert failed.errors.data is not None
    assert [(error.code, error.line) for error in failed.errors.data] == [("model_not_found", 1)]
    assert done.status == "completed"


@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_a_key_that_ends_meanwhile(house: House, file: KeyFile, how: str) -> None:
    """What ran is kept, the rest fails by name. Whoever made it cannot ask any more, but the files
    are there."""
    seconds = house.clock.now + 100
    secret = add(file, "alice", expires_seconds=seconds)
    live: list[FakeGeneration] = []
    house.service.script = live.append
    async with house.client() as client:
        alice = client.with_options(api_key=secret)
        batch = await begin(alice, [chat(str(number)) for number in range(7)])
        for _ in range(4):
            await house.service.arrivals.get()
        if how == "revoked":
            file.remove("alice")
        else:
            house.clock.now += 101
        for one in live:
            one.say("hello")
        await ended(house, batch)
        with pytest.raises(openai.AuthenticationError):
            await alice.batches.retrieve(batch)
        if how == "revoked":
            add(file, "alice")
        else:
            house.clock.now -= 101
        done = await over(alice, batch)
        bad = await lines_of(alice, done.error_file_id)

    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (4, 3)
    assert [line["error"]["code"] for line in bad] == ["invalid_api_key"] * 3


async def test_a_key_that_is_gone_at_the_next_start(house: House, file: KeyFile) -> None:
    """All that is left fails by name, without being asked."""
    secret = add(file, "alice")
    house.service.script = None
    async with house.client() as client:
        alice = client.with_options(api_key=secret)
        batch = await begin(alice, [chat(str(number)) for number in range(3)])
        await until(alice, batch, lambda seen: seen.status == "in_progress")
        await house.service.arrivals.get()
    file.remove("alice")
    house.service.submitted.clear()
    async with house.client() as client:
        await ended(house, batch)
        add(file, "alice")
        alice = client.with_options(api_key=secret)
        done = await over(alice, batch)
        bad = await lines_of(alice, done.error_file_id)

    assert house.service.submitted == []
    assert [line["error"]["code"] for line in bad] == ["invalid_api_key"] * 3


async def test_tokens_are_those_of_the_key(house: House, file: KeyFile) -> None:
    """A limit on them holds a batch up until there are more, and fails nothing."""
    secret = add(file, "alice", tokens_per_minute=60)
    async with house.client() as client:
        alice = client.with_options(api_key=secret)
        batch = await begin(alice, [chat(str(number)) for number in range(5)])
        some = await until(alice, batch, lambda seen: seen.request_counts.completed > 0)

        def later(seen: openai.types.Batch) -> bool:
            house.clock.now += 10
            return seen.status == "completed"

        done = await until(alice, batch, later)

    for seen, least, most in ((some, 1, 4), (done, 5, 5)):
        assert seen.request_counts is not None
        assert seen.request_counts.failed == 0
        assert least <= seen.request_counts.completed <= most
    assert done.usage is not None
    assert done.usage.total_tokens > 60


async def test_requests_of_a_batch_are_none_of_the_key(house: House, file: KeyFile) -> None:
    """Limits on requests, per minute and at once, are for what is asked by HTTP."""
    secret = add(file, "alice", requests_per_minute=3, concurrency=1)
    async with house.client() as client:
        alice = client.with_options(api_key=secret)
        done = await over(alice, await begin(alice, [chat(str(number)) for number in range(5)]))
        raw = await alice.files.with_raw_response.create(file=("a", b"x"), purpose="batch")

    assert done.request_counts is not None
    assert done.request_counts.completed == 5
    assert raw.headers["x-ratelimit-remaining-requests"] == "0"


class Deaf:
    """A sink that nobody reads from."""

    def produced(self, produced: Produced) -> None: ...

    def ended(self, times: RequestTimes | None, failure: Exception | None) -> None: ...


async def test_batches_take_no_place_in_the_queue(house: House, file: KeyFile) -> None:
    """Where a request of the same key would wait, one of a batch is told that there is no room; and
    it does not overtake those who wait."""
    service = FakeService()
    add(file, "alice")
    owner = digest("sk-alice")
    admission = Admission(service, house.access)  # type: ignore[arg-type]
    batch = house.access.on_behalf_of(owner)
    assert batch is not None

    def submit(name: str, caller: Caller) -> Any:
        request = SubmitRequest(id=name, model="small", prompt=(1,), max_tokens=1, body=b"")
        return admission.submit(request, caller, Deaf())

    service.room = 0
    with pytest.raises(QueueFull):
        submit("1", batch)
    waiting = submit("2", Caller(batch.meter))
    service.room = 1
    with pytest.raises(QueueFull):
        submit("3", batch)
    waiting.cancel(FinishReason.CANCELLED)  # and then there is room
    submit("4", batch)

    assert len(service.submitted) == 1
    assert house.access.on_behalf_of("") is KEYLESS
    assert house.access.on_behalf_of(digest("sk-nobody")) is None


async def test_what_is_asked_again_counts_once(house: House, file: KeyFile) -> None:
    """Of a line that was not done when the daemon ended nothing is counted for the key, not even
    its choice that was whole; later all choices are, once."""
    secret = add(file, "alice")
    drains = GenerationFailed("shutting_down", "no more of this", 503)

    def first_life(generation: FakeGeneration) -> None:
        if len(house.service.submitted) == 3:
            generation.fail(drains)
        else:
            generation.say("hello")

    house.bounds["at_once"] = 1
    house.service.script = first_life
    async with house.client() as client:
        alice = client.with_options(api_key=secret)
        batch = await begin(alice, [chat("a"), chat("b", n=2)])
        for _ in range(3):
            await house.service.arrivals.get()
        await until(alice, batch, lambda seen: seen.request_counts.completed == 1)
        of_a = counted(house)
    after_first = counted(house)

    house.service.script = lambda generation: generation.say("hello")
    async with house.client() as client:
        alice = client.with_options(api_key=secret)
        done = await over(alice, batch)
        await polled(lambda: _true(counted(house)["requests"] == 3))

    prompts = [len(one.request.prompt) for one in house.service.submitted]
    assert len(prompts) == 5
    assert of_a == after_first
    assert (of_a["requests"], of_a["prompt"]) == (1, prompts[0])
    assert done.usage is not None
    assert counted(house) == {
        "requests": 3,
        "prompt": prompts[0] + prompts[3] + prompts[4],
        "output": done.usage.output_tokens,
    }


async def _true(value: bool) -> bool | None:
    return value or None


def counted(house: House) -> dict[str, int]:
    """What the metrics say that `alice` had."""
    text = house.access.metrics.registry.exposition().decode()
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("appliance_key_requests_total{"):
            found["requests"] = int(float(value))
        for kind in ("prompt", "output"):
            if name.startswith("appliance_key_tokens_total{") and kind in name:
                found[kind] = int(float(value))
    return found


async def test_a_key_has_a_share_of_what_may_be_stored(house: House, file: KeyFile) -> None:
    """Its uploads and its new batches are refused, and what it runs waits, beyond it. Those of
    another key go on."""
    house.bounds = {"max_owner_bytes": 20_000, "at_once": 1}
    house.service.script = lambda generation: generation.say("hello " * 150)
    secrets = [add(file, name) for name in ("alice", "bob")]
    async with house.client() as client:
        alice, bob = (client.with_options(api_key=secret) for secret in secrets)
        ballast = await bob.files.create(file=("a", b"x" * 8000), purpose="batch")
        batch = await begin(bob, [chat(str(number), max_tokens=150) for number in range(8)])

        async def refused() -> bool | None:
            try:
                await bob.files.create(file=("a", b""), purpose="batch")
            except openai.APIStatusError as error:
                full = "files of this API key take all of the 20000 bytes" in str(error)
                return True if error.status_code == 413 and full else None
            return None

        await polled(refused)
        done = await over(alice, await begin(alice, [chat("a")]))
        assert done.status == "completed"
        seen = await bob.batches.retrieve(batch)
        assert seen.status == "in_progress"
        with pytest.raises(openai.APIStatusError, match="delete some"):
            await begin(bob, [chat("a")])

        await bob.files.delete(ballast.id)
        done = await over(bob, batch)
        assert done.request_counts is not None
        assert done.request_counts.completed == 8
