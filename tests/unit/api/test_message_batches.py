"""Anthropic's message batches as its own client meets them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse
from anthropic.types.messages.batch_create_params import Request

from appliance.access.keys import KeyFile
from appliance.api.app import create_app
from appliance.api.batch import runner
from appliance.batches.files import MESSAGES_INPUT, FileStore
from appliance.batches.log import BatchLog
from appliance.vocabulary import FinishReason, RequestClass
from tests.unit.api.test_batches import CHATS, House, begin, chat, house, over, polled
from tests.unit.api.test_batches_keys import add, file
from tests.unit.api.test_batches_keys import ended as log_ended
from tests.unit.doubles.fake_service import FakeGeneration, FakeService
from tests.unit.doubles.serving import anthropic_client, served

pytestmark = pytest.mark.thorough

__all__ = ["file", "house"]


def message(name: str, **params: Any) -> Request:
    """A request of a batch."""
    asked = {"model": "small", "max_tokens": 8, "messages": [{"role": "user", "content": name}]}
    return Request(custom_id=name, params=asked | params)  # type: ignore[typeddict-item]


async def ended(claude: anthropic.AsyncAnthropic, id: str) -> MessageBatch:
    """The batch as soon as it is over; a client has to ask again and again."""

    async def ask() -> MessageBatch | None:
        seen = await claude.messages.batches.retrieve(id)
        return seen if seen.processing_status == "ended" else None

    return await polled(ask)


async def results_of(
    claude: anthropic.AsyncAnthropic, id: str
) -> list[MessageBatchIndividualResponse]:
    return [one async for one in await claude.messages.batches.results(id)]


def files_of(house: House) -> list[str]:
    return sorted(path.name for path in (house.folder / "files").glob("*.jsonl"))


async def test_messages_are_answered(house: House) -> None:
    """Each has its result, in the order of the requests; the work is of the class batch."""
    asked = [message("one"), message("two", system=[{"type": "text", "text": "a\nb"}])]
    asked += [message("hot", temperature=9.0), message("stream", stream=True)]
    async with anthropic_client(house.app()) as claude:
        begun = await claude.messages.batches.create(requests=asked)
        assert begun.id.startswith("msgbatch_")
        assert (begun.processing_status, begun.request_counts.processing) == ("in_progress", 4)
        assert (begun.ended_at, begun.results_url, begun.archived_at) == (None, None, None)
        done = await ended(claude, begun.id)
        results = await results_of(claude, begun.id)

    counts = done.request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (2, 2, 0)
    assert (counts.canceled, counts.expired) == (0, 0)
    assert done.created_at == datetime.fromtimestamp(house.clock.now, UTC)
    assert done.expires_at - done.created_at == timedelta(hours=24)
    assert done.ended_at is not None
    assert [one.custom_id for one in results] == ["one", "two", "hot", "stream"]
    for one in results[:2]:
        assert one.result.type == "succeeded"
        assert [block.to_dict() for block in one.result.message.content] == [
            {"type": "text", "text": "hello"}
        ]
    for one, field in zip(results[2:], ("temperature", "stream"), strict=True):
        assert one.result.type == "errored"
        assert one.result.error.error.type == "invalid_request_error"
        assert field in one.result.error.error.message
    batched = house.service.submitted
    assert {one.request.request_class for one in batched} == {RequestClass.BATCH}
    told = house.registry.exposition().decode()
    assert 'appliance_batch_requests_total{outcome="completed"} 2.0' in told


async def test_a_results_url_can_be_fetched(house: House) -> None:
    """It is whole, as clients use it without their library."""
    async with anthropic_client(house.app()) as claude:
        batch = await claude.messages.batches.create(requests=[message("one")])
        url = (await ended(claude, batch.id)).results_url
        assert url is not None
        async with httpx.AsyncClient() as plain:
            answer = await plain.get(url)

    assert url == f"{str(claude.base_url).rstrip('/')}/v1/messages/batches/{batch.id}/results"
    assert answer.headers["content-type"] == "application/x-jsonl"
    assert json.loads(answer.text)["custom_id"] == "one"


async def test_dialects_do_not_see_each_others_batches(house: House) -> None:
    """Nor are there files of a message batch; one that is over needs no input any more."""
    async with served(house.app()) as port:
        base = f"http://127.0.0.1:{port}"
        claude = anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0)
        client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
        async with claude, client:
            theirs = (await claude.messages.batches.create(requests=[message("one")])).id
            await ended(claude, theirs)
            hidden = files_of(house)
            ours = await begin(client, [chat("a")])
            await over(client, ours)
            assert [batch.id async for batch in client.batches.list()] == [ours]
            assert [batch.id async for batch in claude.messages.batches.list()] == [theirs]
            files = [file.id async for file in client.files.list()]
            for name in hidden:
                id = name.removesuffix(".jsonl")
                assert id not in files
                for asked in (
                    client.files.content(id),
                    client.files.delete(id),
                    client.batches.create(
                        input_file_id=id, endpoint=CHATS, completion_window="24h"
                    ),
                ):
                    with pytest.raises(openai.NotFoundError):
                        await asked
            with pytest.raises(openai.NotFoundError):
                await client.batches.retrieve(theirs)
            with pytest.raises(anthropic.NotFoundError) as unknown:
                await claude.messages.batches.retrieve(ours)

    assert len(files) == 2
    body: Any = unknown.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")


async def test_pages(house: House) -> None:
    """The newest first, forwards from one and backwards from one."""
    async with anthropic_client(house.app()) as claude:
        ids = []
        for number in range(5):
            batch = await claude.messages.batches.create(requests=[message(str(number))])
            await ended(claude, batch.id)
            ids.insert(0, batch.id)
            house.clock.now += 1
        batches = claude.messages.batches
        forwards = [batch.id async for batch in batches.list(limit=2)]
        first = await batches.list(limit=2, before_id=ids[3])
        last = await batches.list(limit=2, before_id=ids[1])
        beta = [batch.id async for batch in claude.beta.messages.batches.list()]
        for query in (
            {"limit": 0},
            {"limit": 1001},
            {"after_id": "x"},
            {"before_id": "x"},
            {"before_id": ids[0], "after_id": ids[1]},
            {"after": ids[0]},
        ):
            with pytest.raises(anthropic.BadRequestError) as bad:
                await batches.list(extra_query=query)
            assert next(iter(query)) in str(bad.value)

    assert forwards == beta == ids
    assert ([batch.id for batch in first.data], first.has_more) == (ids[1:3], True)
    assert (first.first_id, first.last_id) == (ids[1], ids[2])
    assert ([batch.id for batch in last.data], last.has_more) == (ids[:1], False)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "JSON"),
        (b"{}", "requests"),
        (b'{"requests": []}', "requests: 1 to 50"),
        (b'{"requests": {}}', "requests"),
        (b'{"requests": [], "model": "small"}', "model"),
        (b'{"requests": [{"params": {}}]}', "custom_id"),
        (b'{"requests": [{"custom_id": "a"}]}', "params"),
        (b'{"requests": [{"custom_id": "", "params": {}}]}', "custom_id"),
        (b'{"requests": [{"custom_id": "%s", "params": {}}]}' % (b"a" * 65), "custom_id"),
        (b'{"requests": [{"custom_id": "a", "params": []}]}', "requests[0].params"),
        (b'{"requests": [{"custom_id": "a", "params": {"x": "\xff"}}]}', "requests[0].params"),
        (
            b'{"requests": [{"custom_id": "a", "params": {}}, {"custom_id": "a", "params": {}}]}',
            "requests[1].custom_id",
        ),
        (
            b'{"requests": [%s]}'
            % b",".join(b'{"custom_id": "%d", "params": {}}' % number for number in range(51)),
            "requests: 1 to 50",
        ),
        (
            b'{"requests": [{"custom_id": "a", "params": %s}]}' % (b'{"a":' * 9999 + b"}" * 9999),
            "nested",
        ),
    ],
)
async def test_bodies_that_are_refused(house: House, body: bytes, said: str) -> None:
    """At once and by name, in Anthropic's words; nothing of them stays."""
    async with served(house.app()) as port, httpx.AsyncClient() as plain:
        url = f"http://127.0.0.1:{port}/v1/messages/batches"
        answer = await plain.post(url, content=body)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert said in answer.json()["error"]["message"]
    assert files_of(house) == []


async def test_cancel_and_delete(house: House) -> None:
    """What ran and what waited is canceled; only what has ended can be deleted, and is gone."""
    house.service.script = None
    house.bounds = {"at_once": 1}
    async with anthropic_client(house.app()) as claude:
        batches = claude.messages.batches
        id = (await batches.create(requests=[message(name) for name in "abc"])).id
        (await house.service.arrivals.get()).say("hello")
        running = await house.service.arrivals.get()
        with pytest.raises(anthropic.ConflictError, match="cancel it first"):
            await batches.delete(id)
        with pytest.raises(anthropic.AnthropicError, match="results_url"):
            await batches.results(id)
        assert (await batches.cancel(id)).processing_status in ("canceling", "ended")
        done = await ended(claude, id)
        results = await results_of(claude, id)
        with pytest.raises(anthropic.ConflictError):
            await batches.cancel(id)
        deleted = await batches.delete(id)
        for gone in (batches.retrieve, batches.cancel, batches.delete):
            with pytest.raises(anthropic.NotFoundError):
                await gone(id)

    assert running.reason is FinishReason.CANCELLED
    assert done.cancel_initiated_at is not None
    assert (done.request_counts.succeeded, done.request_counts.canceled) == (1, 2)
    assert [one.result.type for one in results] == ["succeeded", "canceled", "canceled"]
    assert (deleted.id, deleted.type) == (id, "message_batch_deleted")
    assert house.recorded() == []
    assert {path.name for path in house.folder.rglob("*") if path.is_file()} == {
        "lock",
        "store.sqlite",
        "store-copy.sqlite",
    }


async def test_a_restart_and_the_end_of_the_window(house: House) -> None:
    """What is done is not done again; what is not when 24 hours are over expired."""

    def first(generation: FakeGeneration) -> None:
        if generation is house.service.submitted[0]:
            generation.say("hello")

    house.service.script = first
    async with anthropic_client(house.app()) as claude:
        id = (await claude.messages.batches.create(requests=[message(n) for n in "ab"])).id

        async def written() -> bool | None:
            found = house.batches.find(id)
            return (found is not None and found.completed == 1) or None

        await polled(written)
    async with anthropic_client(house.app()) as claude:
        seen = await claude.messages.batches.retrieve(id)
        assert (seen.processing_status, seen.request_counts.processing) == ("in_progress", 2)
    house.clock.now += 24 * 3600
    async with anthropic_client(house.app()) as claude:
        done = await ended(claude, id)
        results = await results_of(claude, id)
    async with anthropic_client(house.app()) as claude:
        again = await claude.messages.batches.retrieve(id)

    assert (done.request_counts.succeeded, done.request_counts.expired) == (1, 1)
    assert [one.result.type for one in results] == ["succeeded", "expired"]
    assert again.to_dict() | {"results_url": None} == done.to_dict() | {"results_url": None}


async def test_an_input_that_vanished(house: House) -> None:
    """What is done has its result; the rest is told as errors."""
    house.service.script = None
    async with anthropic_client(house.app()) as claude:
        id = (await claude.messages.batches.create(requests=[message(n) for n in "ab"])).id
        await house.service.arrivals.get()
    for path in (house.folder / "files").glob("*.jsonl"):
        path.unlink()
    async with anthropic_client(house.app()) as claude:
        done = await ended(claude, id)
        results = await results_of(claude, id)

    assert (done.request_counts.errored, done.request_counts.processing) == (2, 0)
    assert results == []


async def test_keys(house: House, file: KeyFile) -> None:
    """A batch is of the key that made it, whose end is the error of what is left; a key without
    batch work makes none."""
    add(file, "bob", classes=(RequestClass.INTERACTIVE,))
    house.bounds = {"at_once": 1}
    house.service.script = None
    async with anthropic_client(house.app()) as claude:
        secret = add(file, "alice")
        alice_client = claude.with_options(api_key=secret)
        alice = alice_client.messages.batches
        bob = claude.with_options(api_key="sk-bob").messages.batches
        id = (await alice.create(requests=[message(name) for name in "ab"])).id
        running = await house.service.arrivals.get()
        for asking in (bob.retrieve, bob.cancel, bob.delete):
            with pytest.raises(anthropic.NotFoundError):
                await asking(id)
        assert [batch.id async for batch in bob.list()] == []
        with pytest.raises(anthropic.PermissionDeniedError, match="batch work"):
            await bob.create(requests=[message("a")])
        file.remove("alice")
        running.say("hello")
        await log_ended(house, id)
        add(file, "alice")
        await ended(alice_client, id)  # the record is on disk a moment before the batch is over
        first, second = [one.result async for one in await alice.results(id)]

    assert first.type == "succeeded"
    assert second.type == "errored"
    assert second.error.error.type == "authentication_error"


async def test_no_service_level(house: House) -> None:
    """A batch has none of its own, and so its client is told."""
    async with anthropic_client(house.app()) as claude:
        with pytest.raises(anthropic.BadRequestError, match="x-slo"):
            await claude.messages.batches.create(
                requests=[message("a")], extra_headers={"x-slo": "ttft=1s"}
            )


async def test_bounds(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many batches at once, no room, a disk that refuses: nothing of what was asked stays."""
    monkeypatch.setattr(runner, "MAX_UNFINISHED", 1)
    house.service.script = None
    async with anthropic_client(house.app()) as claude:
        batches = claude.messages.batches
        id = (await batches.create(requests=[message("a")])).id
        before = files_of(house)
        with pytest.raises(anthropic.RateLimitError):
            await batches.create(requests=[message("a")])
        assert files_of(house) == before
        await batches.cancel(id)
        await ended(claude, id)

        def refuses(log: BatchLog, records: Any) -> None:
            raise OSError(28, "No space left on device")

        before = files_of(house)
        with monkeypatch.context() as broken:
            broken.setattr(BatchLog, "append", refuses)
            with pytest.raises(anthropic.InternalServerError) as full:
                await batches.create(requests=[message("a")])
        assert full.value.status_code == 507
        large = message("b", system="x" * 9000)
        monkeypatch.setattr(FileStore, "is_full", lambda *_: True)
        with pytest.raises(anthropic.APIStatusError, match="delete some") as no_room:
            await batches.create(requests=[large])
        assert no_room.value.status_code == 413
        assert files_of(house) == before


async def test_what_was_left_over_is_swept_up(house: House) -> None:
    """An input whose batch was never made, as its client or the daemon was gone by then."""
    async with anthropic_client(house.app()) as claude:
        id = (await claude.messages.batches.create(requests=[message("a")])).id
        await ended(claude, id)
    (output,) = files_of(house)
    with house.store() as store:
        files = FileStore(store, house.folder / "files", max_bytes=10**6, keep_seconds=3600.0)
        files.open()
        files.write("file-1", "", "in.jsonl", [b"{}\n"], house.clock.now, MESSAGES_INPUT)
    house.clock.now += 3601
    async with anthropic_client(house.app()) as claude:

        async def swept() -> bool | None:
            return files_of(house) == [output] or None

        await polled(swept)
        assert len(await results_of(claude, id)) == 1


async def test_without_a_folder_there_are_none() -> None:
    """Every endpoint says why."""
    async with anthropic_client(create_app(FakeService())) as claude:
        batches = claude.messages.batches
        for asking in (
            batches.create(requests=[message("a")]),
            batches.retrieve("b"),
            batches.cancel("b"),
            batches.delete("b"),
        ):
            with pytest.raises(anthropic.NotFoundError, match="directory is not set"):
                await asking
        with pytest.raises(anthropic.NotFoundError, match="directory is not set"):
            await batches.list()
