"""Files and batches as OpenAI's client meets them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import msgspec
import openai
import pytest
from litestar import Litestar

from appliance.access.admission import Admission
from appliance.access.auth import Access
from appliance.api.app import create_app
from appliance.api.batch import executor
from appliance.api.batch import runner as batchrunner
from appliance.api.batch.runner import BatchRunner, BatchSettings
from appliance.batches.log import BatchLog, load_all
from appliance.batches.records import Batch, CancelAsked, Created, Ended, LineDone, Record
from appliance.batches.results import Results, answered
from appliance.batches.store import store_in
from appliance.batches.writer import BatchWriter
from appliance.gateway.sessions import FrontSettings, Sessions
from appliance.observability.batch_metrics import BatchMetrics
from appliance.observability.registry import Registry
from appliance.platform.database import Database
from appliance.service.interface import GenerationFailed
from appliance.vocabulary import FinishReason, RequestClass, Task
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.fake_service import FakeGeneration, FakeService
from tests.unit.doubles.front import FrontDouble
from tests.unit.doubles.serving import openai_client

pytestmark = pytest.mark.thorough

Found = TypeVar("Found")
CHATS: Any = "/v1/chat/completions"
PART = b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n'


class Clock:
    """Unix time that tests move."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class House:
    """An appliance with batches in a folder; a new `app` is a new life of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "batches"
        self.clock = Clock()
        self.service = FakeService(lambda generation: generation.say("hello"))
        self.access = Access()
        self.bounds: dict[str, Any] = {}
        self.registry = Registry()
        self.metrics = BatchMetrics(self.registry)
        self.sessions: Sessions
        """Of the latest life."""
        self.front: FrontDouble
        self.batches: BatchRunner

    @property
    def settings(self) -> BatchSettings:
        bounds: dict[str, Any] = {
            "at_once": 4,
            "max_file_bytes": 100_000,
            "max_requests": 50,
            "max_line_bytes": 10_000,
            "max_stored_bytes": 1_000_000,
            "max_owner_bytes": 1_000_000,
            "keep_seconds": 30 * 24 * 3600.0,
        }
        return BatchSettings(folder=self.folder, **(bounds | self.bounds))

    def runner(self) -> BatchRunner:
        """The batches of a new life, which has one front end."""
        admission = Admission(self.service, self.access)  # type: ignore[arg-type]
        settings = FrontSettings(keep_alive_seconds=5.0, max_body_bytes=10_000)
        self.sessions = Sessions(self.service, self.access, admission, settings)  # type: ignore[arg-type]
        self.front = FrontDouble(self.sessions)
        self.batches = BatchRunner(
            self.service,  # type: ignore[arg-type]
            self.access,
            self.sessions,
            settings=self.settings,
            metrics=self.metrics,
            wall_clock=self.clock,
            retry_seconds=0.01,
        )
        return self.batches

    @contextmanager
    def store(self) -> Iterator[Database]:
        """What is written down, while no life has it open."""
        store = store_in(self.folder)
        store.open()
        try:
            yield store
        finally:
            store.close()

    def recorded(self) -> list[Batch]:
        """The batches that the next life finds."""
        with self.store() as store:
            return load_all(store, self.folder / "batches")

    def app(self) -> Litestar:
        return create_app(self.service, access=self.access, batches=self.runner())  # type: ignore[arg-type]

    @asynccontextmanager
    async def client(self) -> AsyncIterator[openai.AsyncOpenAI]:
        async with openai_client(self.app()) as client:
            yield client


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def chat(name: str, **body: Any) -> dict[str, Any]:
    """A line of an input file."""
    asked = {"model": "small", "messages": [{"role": "user", "content": name}], "max_tokens": 8}
    return {"custom_id": name, "method": "POST", "url": CHATS, "body": asked | body}


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def upload(client: openai.AsyncOpenAI, lines: Iterable[Any]) -> str:
    """The id of a file of these lines."""
    file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return file.id


async def begin(client: openai.AsyncOpenAI, lines: Iterable[Any], endpoint: Any = CHATS) -> str:
    """The id of a batch of these lines."""
    batch = await client.batches.create(
        input_file_id=await upload(client, lines), endpoint=endpoint, completion_window="24h"
    )
    return batch.id


async def polled(ask: Callable[[], Awaitable[Found | None]]) -> Found:
    """What is found in the end."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (found := await ask()) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


async def until(
    client: openai.AsyncOpenAI, batch: str, true: Callable[[Any], bool]
) -> openai.types.Batch:
    """The batch as soon as something is true of it; a client has to ask again and again."""

    async def ask() -> openai.types.Batch | None:
        seen = await client.batches.retrieve(batch)
        return seen if true(seen) else None

    return await polled(ask)


async def over(client: openai.AsyncOpenAI, batch: str) -> openai.types.Batch:
    ends = ("completed", "failed", "expired", "cancelled")
    return await until(client, batch, lambda seen: seen.status in ends)


async def lines_of(client: openai.AsyncOpenAI, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    text = (await client.files.content(file)).text
    return [json.loads(line) for line in text.splitlines()]


# --- files ---------------------------------------------------------------------------------------


async def test_a_file_comes_back_as_it_went_in(house: House) -> None:
    """Byte by byte, after a restart, too; and it is gone when it is deleted."""
    content = bytes(range(256)) * 300
    name = 'ä "b"\r\nx: y.jsonl'
    async with house.client() as client:
        made = await client.files.create(file=(name, content), purpose="batch")
        assert (made.bytes, made.filename, made.purpose) == (len(content), name, "batch")
        assert made.status == "processed"
        assert (await client.files.content(made.id)).content == content
    async with house.client() as client:
        assert await client.files.retrieve(made.id) == made
        assert (await client.files.content(made.id)).content == content
        assert (await client.files.delete(made.id)).deleted
        for gone in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await gone(made.id)
    assert not list((house.folder / "files").iterdir())


async def test_a_file_that_is_deleted_while_it_is_sent(house: House) -> None:
    """Comes whole; whoever asks for it then hears that there is none."""
    app, content = house.app(), bytes(range(256)) * 300

    async def sly(scope: Any, receive: Any, send: Any) -> None:
        async def deleting(event: Any) -> None:
            if event["type"] == "http.response.start" and scope["path"].endswith("/content"):
                for file in (house.folder / "files").glob("*.jsonl"):
                    file.unlink()
            await send(event)

        await app(scope, receive, deleting)

    async with openai_client(cast(Litestar, sly)) as client:
        made = await client.files.create(file=("a", content), purpose="batch")
        assert (await client.files.content(made.id)).content == content
        with pytest.raises(openai.NotFoundError):
            await client.files.content(made.id)


async def test_files_are_listed_in_pages(house: House) -> None:
    """The newest first, or last; `after` goes on where a page ended."""
    async with house.client() as client:
        names = []
        for _ in range(5):
            names.append(await upload(client, [chat("a")]))
            house.clock.now += 1
        newest = [file.id async for file in client.files.list(limit=2)]
        oldest = [file.id async for file in client.files.list(limit=2, order="asc")]
        first = await client.files.list(limit=2)
        others = await client.files.list(purpose="batch_output")
        for limit in (0, 10_001, "1" + "0" * 5000, "x", "-1"):
            with pytest.raises(openai.BadRequestError, match="limit"):
                await client.files.list(limit=limit)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="before"):
            await client.files.list(extra_query={"before": "a"})
        with pytest.raises(openai.BadRequestError, match="order"):
            await client.files.list(order="up")  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="after"):
            await client.files.list(after="file-nobody")

    assert oldest == names
    assert newest == names[::-1]
    assert (len(first.data), first.has_more) == (2, True)
    assert others.data == []


async def test_uploads_that_are_refused(house: House) -> None:
    """By name, and nothing of them stays."""
    async with house.client() as client:

        async def refused(kind: type[openai.APIStatusError], **given: Any) -> str:
            asked = {"file": ("a.jsonl", b"x"), "purpose": "batch"} | given
            with pytest.raises(kind) as caught:
                await client.files.create(**asked)
            return str(caught.value)

        bad = openai.BadRequestError
        assert "purpose" in await refused(bad, purpose="fine-tune")
        anchor = {"anchor": "created_at", "seconds": 3600}
        assert "expires_after" in await refused(bad, expires_after=anchor)
        large = ("a.jsonl", b"x" * 100_001)
        assert "100000 bytes" in await refused(openai.APIStatusError, file=large)
        huge = ("a.jsonl", b"x" * 1_000_000)
        assert "Too Large" in await refused(openai.APIStatusError, file=huge)
    assert not list((house.folder / "files").iterdir())


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        ("multipart/form-data; boundary=b", b"", None),
        ("multipart/form-data; boundary=b", b"nothing", None),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\n", None),
        ("multipart/form-data; boundary=b", PART % (b"file", b"x"), None),
        ("multipart/form-data; boundary=b", PART % (b"purpose", b"batch") + b"--b--", "file"),
        ("multipart/form-data; boundary=b", PART % (b"file", b"x") + b"--b--", "purpose"),
        ("multipart/form-data; boundary=b", 2 * (PART % (b"file", b"x")) + b"--b--", "file"),
        ("multipart/form-data; boundary=b", PART % (b"name", b"x" * 2000) + b"--b--", "name"),
        ("multipart/form-data; boundary=b", PART % (b"purpose", b"\xff") + b"--b--", None),
        ("multipart/form-data", b"", None),
        ("application/json", b"{}", None),
    ],
)
async def test_forms_that_cannot_be_read(
    house: House, kind: str, body: bytes, param: str | None
) -> None:
    """Are a 400, and nothing of them stays."""
    async with house.client() as client:
        url = f"{client.base_url}files"
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as plain:
            answer = await plain.post(url, content=body, headers={"content-type": kind})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not list((house.folder / "files").iterdir())


async def test_no_more_is_stored_than_may_be(house: House) -> None:
    """What would go beyond it is refused until something is deleted."""
    house.bounds = {"max_stored_bytes": 10_000}
    async with house.client() as client:
        first = await client.files.create(file=("a", b"x" * 6000), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="delete some") as caught:
            await client.files.create(file=("a", b"x" * 6000), purpose="batch")
        await client.files.delete(first.id)
        for content in (b"x" * 5900, b""):
            await client.files.create(file=("a", content), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="delete some"):
            await client.files.create(file=("a", b""), purpose="batch")

    assert caught.value.status_code == 413


async def test_no_batch_is_made_while_outputs_take_too_much(house: House) -> None:
    """They are whole nevertheless; when some are deleted the next batch is made. Logs count."""
    house.bounds = {"max_stored_bytes": 4 * 4096 + 2000}
    async with house.client() as client:
        file = await upload(client, [chat("a")])
        given: Any = {"input_file_id": file, "endpoint": CHATS, "completion_window": "24h"}
        first, second = [
            await over(client, (await client.batches.create(**given)).id) for _ in range(2)
        ]
        with pytest.raises(openai.APIStatusError, match="delete some") as caught:
            await client.batches.create(**given)
        assert len(await lines_of(client, second.output_file_id)) == 1
        assert first.output_file_id is not None
        assert second.output_file_id is not None
        await client.files.delete(first.output_file_id)
        await client.files.delete(second.output_file_id)
        third = await over(client, (await client.batches.create(**given)).id)

    assert caught.value.status_code == 413
    assert third.status == "completed"


async def test_a_batch_is_paused_while_there_is_no_room(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """What it has so far takes more than may be: the rest is asked when something was deleted."""
    house.bounds = {"max_stored_bytes": 20_000, "at_once": 1}
    house.service.script = lambda generation: generation.say("hello " * 150)
    async with house.client() as client:
        ballast = await client.files.create(file=("a", b"x" * 8000), purpose="batch")
        batch = await begin(client, [chat(str(number), max_tokens=150) for number in range(8)])
        await until_logged(caplog, "batches are paused")
        seen = await client.batches.retrieve(batch)
        assert seen.status == "in_progress"
        assert seen.request_counts is not None
        assert 0 < seen.request_counts.completed < 8
        with pytest.raises(openai.APIStatusError, match="delete some"):
            await client.files.create(file=("a", b""), purpose="batch")
        await client.files.delete(ballast.id)
        done = await over(client, batch)

    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.completed == 8
    assert caplog.text.count("batches are paused") == 1


async def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async def logged() -> bool | None:
        return text in caplog.text or None

    await polled(logged)


async def test_a_batch_without_a_waiting_client_is_none(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked was given up before it was on the disk: it is not there after the next start."""
    coming, go_on = threading.Event(), threading.Event()
    append = BatchLog.append

    def slow_append(log: BatchLog, records: Sequence[Record]) -> None:
        coming.set()
        go_on.wait(PATIENCE_SECONDS)
        append(log, records)

    monkeypatch.setattr(BatchLog, "append", slow_append)
    runner = house.runner()
    async with runner.running(house.app()):
        create = runner.create("", CHATS, "file-1", "24h", None)
        creating = asyncio.create_task(create)
        assert await asyncio.to_thread(coming.wait, PATIENCE_SECONDS)
        creating.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await creating
        assert not runner.needed("file-1")

    assert list((house.folder / "batches").iterdir()) == []


async def test_an_upload_that_cannot_be_described(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the disk is full just then: nothing of it stays."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Database, "write", full)
    async with house.client() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await upload(client, [chat("a")])
        assert not list((house.folder / "files").iterdir())

    assert caught.value.status_code == 507


async def test_old_files_and_batches_go(house: House) -> None:
    """When they were kept as long as they are to be; younger ones stay."""
    async with house.client() as client:
        old = await begin(client, [chat("a")])
        done = await over(client, old)
        house.clock.now += 20 * 24 * 3600
        young = await upload(client, [chat("a")])
    house.clock.now += 11 * 24 * 3600
    async with house.client() as client:

        async def swept() -> bool | None:
            files = [file.id async for file in client.files.list()]
            batches = [batch.id async for batch in client.batches.list()]
            return True if (files, batches) == ([young], []) else None

        await polled(swept)

    assert done.status == "completed"


async def test_old_files_that_cannot_be_deleted(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Are named, and keep nothing else from being deleted."""
    async with house.client() as client:
        batch = await begin(client, [chat("a")])
        await over(client, batch)
        house.clock.now += 1
        bad = await upload(client, [chat("a")])  # the newest file is the first to go
        house.clock.now -= 2
        old = await begin(client, [chat("a")])
        await over(client, old)
    house.clock.now += 31 * 24 * 3600
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.name in (f"{bad}.jsonl", f"{old}.entries"):
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    async with house.client() as client:

        async def swept() -> bool | None:
            files = [file.id async for file in client.files.list()]
            batches = [batch.id async for batch in client.batches.list()]
            return True if (files, batches) == ([bad], [old]) else None

        await polled(swept)

    assert f"{bad} has expired and cannot be deleted" in caplog.text
    assert f"{old} has expired and cannot be deleted" in caplog.text


# --- batches -------------------------------------------------------------------------------------


async def test_a_batch_is_answered_as_http_answers(house: House) -> None:
    """Every line with its own id, in the order of the input; what is refused is in the error
    file; tokens are counted; the work is of the class batch."""
    lines = [chat("one"), chat("two", service_tier="default"), chat("bad", temperature=9.0)]
    lines += [chat("stream", stream=True), chat("four", n=2)]
    async with house.client() as client:
        asked = await client.batches.create(
            input_file_id=await upload(client, lines),
            endpoint=CHATS,
            completion_window="24h",
            metadata={"for": "tests"},
        )
        assert (asked.status, asked.object, asked.endpoint) == ("validating", "batch", CHATS)
        done = await over(client, asked.id)
        good = await lines_of(client, done.output_file_id)
        bad = await lines_of(client, done.error_file_id)
        files = {file.purpose for file in (await client.files.list()).data}

    assert done.status == "completed"
    assert done.metadata == {"for": "tests"}
    counts = done.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (5, 3, 2)
    assert [line["custom_id"] for line in good] == ["one", "two", "four"]
    assert {line["response"]["status_code"] for line in good} == {200}
    said = [choice["message"]["content"] for choice in good[0]["response"]["body"]["choices"]]
    assert said == ["hello"]
    assert len(good[2]["response"]["body"]["choices"]) == 2
    used = [line["response"]["body"]["usage"] for line in good]
    assert done.usage is not None
    assert done.usage.input_tokens == sum(usage["prompt_tokens"] for usage in used)
    assert done.usage.output_tokens == sum(usage["completion_tokens"] for usage in used)
    assert [line["custom_id"] for line in bad] == ["bad", "stream"]
    assert [line["response"]["body"]["error"]["param"] for line in bad] == ["temperature", "stream"]
    assert all(line["response"]["status_code"] == 400 for line in bad)
    batched = house.service.submitted
    assert {one.request.request_class for one in batched} == {RequestClass.BATCH}
    assert files == {"batch", "batch_output"}
    moments = [done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at]
    assert None not in moments
    told = house.registry.exposition().decode()
    assert 'appliance_batch_requests_total{outcome="completed"} 3.0' in told
    assert 'appliance_batch_requests_total{outcome="failed"} 2.0' in told
    assert "appliance_batches_unfinished 0.0" in told


async def test_tokens_of_reasoning_are_counted(house: House) -> None:
    """Of all requests together, and the same after a restart."""
    house.service.script = lambda generation: generation.say("(why)ok")
    lines = [chat(name, model="org/small") for name in ("a", "b")]
    async with house.client() as client:
        batch = await begin(client, lines)
        done = await over(client, batch)
        good = await lines_of(client, done.output_file_id)
    async with house.client() as client:
        again = await client.batches.retrieve(batch)

    said = [line["response"]["body"]["usage"]["completion_tokens_details"] for line in good]
    assert done.usage is not None
    assert done.usage.output_tokens_details.reasoning_tokens == 6
    assert [one["reasoning_tokens"] for one in said] == [3, 3]
    assert again.usage == done.usage


async def test_long_answers_are_written_off_the_event_loop(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else waits until the line of one is made; that of a short one is made at once."""
    beside: dict[str, bool] = {}

    def noted(endpoint: str, custom_id: str, status: int, body: bytes) -> msgspec.Raw:
        beside[custom_id] = threading.current_thread() is not threading.main_thread()
        return answered(endpoint, custom_id, status, body)

    def script(generation: FakeGeneration) -> None:
        generation.say("hello" * (60_000 if "long" in generation.text else 1))

    monkeypatch.setattr(executor, "answered", noted)
    house.service.script = script
    async with house.client() as client:
        done = await over(client, await begin(client, [chat("long"), chat("short")]))
        long, _ = await lines_of(client, done.output_file_id)

    assert beside == {"long": True, "short": False}
    assert long["response"]["body"]["choices"][0]["message"]["content"] == "hello" * 60_000


async def test_plain_completions(house: House) -> None:
    """Are another endpoint; a model may have a slash in its name."""
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
    asked = {"model": "org/small", "prompt": "hello"}
    async with house.client() as client:
        batch = await begin(client, [line | {"body": asked}], "/v1/completions")
        done = await over(client, batch)
        (answer,) = await lines_of(client, done.output_file_id)

    assert answer["response"]["body"]["choices"]
    assert done.error_file_id is None
    (generation,) = house.service.submitted
    assert (generation.request.model, generation.text) == ("org/small", "hello")


async def test_embeddings(house: House) -> None:
    """All texts of a line are asked at once, as work of the class batch."""
    house.service.learn("embedder", Task.EMBED)
    house.service.script = lambda generation: generation.pool([1.0])
    texts = [f"text {number}" for number in range(6)]
    body = {"model": "embedder", "input": texts}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": body}
    async with house.client() as client:
        batch = await begin(client, [line], "/v1/embeddings")
        done = await over(client, batch)
        (good,) = await lines_of(client, done.output_file_id)

    assert len(good["response"]["body"]["data"]) == 6
    asked = house.service.submitted
    assert {one.request.request_class for one in asked} == {RequestClass.BATCH}
    assert all(one.request.pooled for one in asked)
    assert done.usage is not None
    assert done.usage.input_tokens == sum(len(text) for text in texts)
    assert done.usage.output_tokens == 0


@pytest.mark.parametrize(
    ("content", "codes"),
    [
        (b"", [("empty_file", None)]),
        (b"\n  \n", [("empty_file", None)]),
        (b"{\n", [("invalid_json_line", 1)]),
        (b"\xff\n", [("invalid_json_line", 1)]),
        (b"[1]\n", [("invalid_request", 1)]),
        (jsonl([{"method": "POST", "url": CHATS, "body": {}}]), [("invalid_request", 1)]),
        (jsonl([chat("a"), chat("a")]), [("duplicate_custom_id", 2)]),
        (b"\n" + jsonl([chat("")]), [("invalid_custom_id", 2)]),
        (jsonl([chat("a") | {"url": "/v1/completions"}]), [("invalid_url", 1)]),
        (jsonl([chat("a") | {"method": "GET"}]), [("invalid_method", 1)]),
        (jsonl([chat("a", model="nobody")]), [("model_not_found", 1)]),
        (jsonl([chat("a") | {"body": {}}]), [("invalid_request", 1)]),
        (jsonl([chat("a", model=1), chat("b", model="no")]),
         [("invalid_request", 1), ("model_not_found", 2)]),
        (jsonl([chat("a", messages="x" * 11_000)]), [("line_too_long", 1)]),
        (jsonl(chat(str(number)) for number in range(51)), [("too_many_requests", None)]),
        (jsonl([1] * 50), [("invalid_request", number) for number in range(1, 51)]),
    ],
)  # fmt: skip
async def test_inputs_that_are_refused(
    house: House, content: bytes, codes: list[tuple[str, int | None]]
) -> None:
    """The batch fails with what is wrong by line, and nothing of it runs."""
    async with house.client() as client:
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHATS, completion_window="24h"
        )
        failed = await over(client, batch.id)

    assert failed.status == "failed"
    assert failed.errors is not None
    assert failed.errors.data is not None
    found = [(error.code, error.line) for error in failed.errors.data]
    assert found == codes
    assert all(error.message for error in failed.errors.data)
    assert failed.output_file_id is failed.error_file_id is None
    assert house.service.submitted == []


async def test_batches_that_cannot_be_made(house: House) -> None:
    """Are refused at once, and name the field."""
    async with house.client() as client:
        file = await upload(client, [chat("a")])
        done = await over(client, await begin(client, [chat("a")]))
        given = {"input_file_id": file, "endpoint": CHATS, "completion_window": "24h"}
        output = done.output_file_id
        for field, value in (
            ("input_file_id", "file-nobody"),
            ("input_file_id", output),
            ("endpoint", "/v1/moderations"),
            ("completion_window", "1h"),
            ("metadata", {str(number): "x" for number in range(17)}),
            ("output_expires_after", {"anchor": "created_at", "seconds": 3600}),
        ):
            with pytest.raises(openai.APIStatusError) as caught:
                await client.batches.create(**(given | {field: value}))
            assert caught.value.status_code in (400, 404)
            assert caught.value.body["param"] == field  # type: ignore[index]
        with pytest.raises(openai.BadRequestError, match="x-slo"):
            await client.batches.create(
                input_file_id=file,
                endpoint=CHATS,
                completion_window="24h",
                extra_headers={"x-slo": "ttft=1s"},
            )
        for name in ("batch_nobody", "..%2f..", "x" * 300):
            with pytest.raises(openai.NotFoundError):
                await client.batches.retrieve(name)
            with pytest.raises(openai.NotFoundError):
                await client.batches.cancel(name)


async def test_only_so_many_batches_of_an_owner_are_unfinished(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those count, and need their files, that are still on their way to the disk; one that does not
    get there does not."""
    coming, go_on = threading.Event(), threading.Event()
    full = True
    append = BatchLog.append

    def slow_append(log: BatchLog, records: Sequence[Record]) -> None:
        if isinstance(records[0], Created):
            coming.set()
            go_on.wait(PATIENCE_SECONDS)
            if full:
                raise OSError(28, "No space left on device")
        append(log, records)

    monkeypatch.setattr(batchrunner, "MAX_UNFINISHED", 1)
    monkeypatch.setattr(BatchLog, "append", slow_append)
    house.service.script = None
    async with house.client() as client:
        file = await upload(client, [chat("a")])

        async def create() -> str:
            made = await client.batches.create(
                input_file_id=file, endpoint=CHATS, completion_window="24h"
            )
            return made.id

        first = asyncio.create_task(create())
        assert await asyncio.to_thread(coming.wait, PATIENCE_SECONDS)
        with pytest.raises(openai.RateLimitError):
            await create()
        with pytest.raises(openai.ConflictError):
            await client.files.delete(file)
        go_on.set()
        with pytest.raises(openai.InternalServerError):
            await first
        full = False
        await create()
        with pytest.raises(openai.RateLimitError):
            await create()


async def test_batches_are_listed_in_pages(house: House) -> None:
    """The newest first, after a restart, too."""
    async with house.client() as client:
        names = []
        for _ in range(3):
            names.append(await begin(client, [chat("a")]))
            await over(client, names[-1])
            house.clock.now += 1
    async with house.client() as client:
        page = await client.batches.list(limit=2)
        listed = [batch.id async for batch in client.batches.list(limit=2)]

    assert listed == names[::-1]
    assert page.has_more


async def test_only_so_many_requests_run_at_once(house: House) -> None:
    """Of all batches together; the next begins when one is over."""
    house.service.script = None
    async with house.client() as client:
        batches = [await begin(client, [chat(str(n)) for n in range(5)]) for _ in range(2)]
        live = [await house.service.arrivals.get() for _ in range(4)]
        for count in range(10):
            assert len(house.service.submitted) == min(10, 4 + count)
            live.pop(0).say("hello")
            if count < 6:
                live.append(await house.service.arrivals.get())
        ends = [(await over(client, batch)).status for batch in batches]

    assert ends == ["completed"] * 2


async def test_a_full_queue_is_waited_out(house: House) -> None:
    """It is no failure of the request."""
    house.service.room = 2
    async with house.client() as client:
        batch = await begin(client, [chat(str(number)) for number in range(5)])
        seen = await until(client, batch, lambda seen: seen.request_counts.completed == 2)
        assert seen.status == "in_progress"
        house.service.room = 1000
        done = await over(client, batch)

    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (5, 0)


async def test_failures_of_the_appliance(house: House) -> None:
    """Those that pass are waited out; the others are in the error file."""
    told = {
        "broken": GenerationFailed("generation_failed", "it broke"),
        "drained": GenerationFailed("model_draining", "later", 503, 1.0),
    }

    def script(generation: FakeGeneration) -> None:
        text = generation.text
        for name in list(told):
            if name in text:
                generation.fail(told[name])
                if name == "drained":
                    del told[name]
                return
        generation.say("hello")

    house.service.script = script
    async with house.client() as client:
        done = await over(client, await begin(client, [chat("broken"), chat("drained")]))
        (bad,) = await lines_of(client, done.error_file_id)
        (good,) = await lines_of(client, done.output_file_id)

    assert bad["custom_id"] == "broken"
    assert bad["response"]["status_code"] == 500
    assert bad["response"]["body"]["error"]["code"] == "generation_failed"
    assert good["custom_id"] == "drained"


async def test_a_cancelled_batch_keeps_what_is_done(house: House) -> None:
    """What runs is ended, what waits never runs, and both are named; a batch that is over cannot
    be cancelled."""

    def script(generation: FakeGeneration) -> None:
        if generation in house.service.submitted[:2]:
            generation.say("hello")

    house.service.script = script
    async with house.client() as client:
        batch = await begin(client, [chat(str(number)) for number in range(8)])
        await until(client, batch, lambda seen: seen.request_counts.completed == 2)
        for _ in range(6):
            await house.service.arrivals.get()
        asked = await client.batches.cancel(batch)
        done = await over(client, batch)
        good = await lines_of(client, done.output_file_id)
        bad = await lines_of(client, done.error_file_id)
        with pytest.raises(openai.ConflictError, match="cancelled cannot be cancelled"):
            await client.batches.cancel(batch)

    assert asked.status == "cancelling"
    assert done.status == "cancelled"
    assert done.cancelled_at is not None
    assert len(good) == 2
    assert sorted(line["custom_id"] for line in (*good, *bad)) == list("01234567")
    assert {line["error"]["code"] for line in bad} == {"batch_cancelled"}
    assert len(house.service.submitted) == 6
    assert [one.reason for one in house.service.submitted[2:]] == [FinishReason.CANCELLED] * 4


@pytest.mark.parametrize("code", ["model_draining", "no_instance", "overloaded"])
async def test_what_passes_is_waited_out(house: House, code: str) -> None:
    """However often a request is refused for it: an operator ends it, or its batch's window."""

    def script(generation: FakeGeneration) -> None:
        if len(house.service.submitted) <= 8:
            generation.fail(GenerationFailed(code, "later", 503, 1.0))
        else:
            generation.say("hello")

    house.service.script = script
    async with house.client() as client:
        done = await over(client, await begin(client, [chat("a")]))

    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 0)


@pytest.mark.parametrize(("losses", "ok"), [(4, True), (5, False)])
async def test_a_front_end_that_is_lost(house: House, losses: int, ok: bool) -> None:
    """Is no fault of the request, which is asked again, but not for ever: it may be what kills.
    Full queues between do not count."""
    held_up = GenerationFailed("model_draining", "later", 503, 1.0)

    def script(generation: FakeGeneration) -> None:
        number = len(house.service.submitted)
        if number <= 6:
            generation.fail(held_up)
        elif number <= 6 + losses:
            house.front.die()
            house.front = FrontDouble(house.sessions)
        else:
            generation.say("hello")

    house.service.script = script
    async with house.client() as client:
        done = await over(client, await begin(client, [chat("a")]))
        bad = [] if ok else await lines_of(client, done.error_file_id)

    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (int(ok), int(not ok))
    assert len(house.service.submitted) == (6 + losses + 1 if ok else 6 + losses)
    assert [line["error"]["code"] for line in bad] == ([] if ok else ["front_end_lost"])


async def test_without_a_front_end_a_batch_waits(house: House) -> None:
    """Until there is one."""
    async with house.client() as client:
        house.front.die()
        batch = await begin(client, [chat("a")])
        await until(client, batch, lambda seen: seen.status == "in_progress")
        assert house.service.submitted == []
        house.front = FrontDouble(house.sessions)
        done = await over(client, batch)

    assert done.request_counts is not None
    assert done.request_counts.completed == 1


async def test_a_refusal_of_the_front_end_is_final(house: House) -> None:
    """Whatever its code: only what the core refuses may pass."""
    async with house.client() as client:
        done = await over(client, await begin(client, [chat("hot", temperature=9.0)]))
        (bad,) = await lines_of(client, done.error_file_id)

    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["code"] == 400
    assert house.service.submitted == []


async def test_what_is_done_when_a_batch_is_cancelled_is_in_its_files(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an answer that the disk takes only after all requests were ended."""
    cancelling, brought, looked = threading.Event(), asyncio.Event(), threading.Event()
    go_on = threading.Event()
    append, bring, look = BatchLog.append, BatchWriter.write, batchrunner.write_results

    def slow_append(log: BatchLog, records: Sequence[Record]) -> None:
        if isinstance(records[0], CancelAsked):
            cancelling.set()
            go_on.wait(PATIENCE_SECONDS)
        elif isinstance(records[0], LineDone):
            looked.wait(0.3)  # in vain, as the files are made of what the disk has
        append(log, records)

    async def noted_write(writer: BatchWriter, record: Record, *more: Any) -> None:
        if isinstance(record, LineDone):
            brought.set()
        await bring(writer, record, *more)

    def noted_results(*given: Any) -> Results:
        results = look(*given)
        looked.set()
        return results

    monkeypatch.setattr(BatchLog, "append", slow_append)
    monkeypatch.setattr(BatchWriter, "write", noted_write)
    monkeypatch.setattr(batchrunner, "write_results", noted_results)
    house.service.script = None
    async with house.client() as client:
        batch = await begin(client, [chat("a"), chat("b")])
        live = await house.service.arrivals.get()
        asking = asyncio.create_task(client.batches.cancel(batch))
        assert await asyncio.to_thread(cancelling.wait, PATIENCE_SECONDS)
        live.say("hello")
        await asyncio.wait_for(brought.wait(), PATIENCE_SECONDS)
        go_on.set()
        await asking
        done = await over(client, batch)
        good = await lines_of(client, done.output_file_id)
        bad = await lines_of(client, done.error_file_id)

    assert done.status == "cancelled"
    assert done.request_counts is not None
    assert (done.request_counts.completed, len(good), len(bad)) == (1, 1, 1)


async def test_a_file_that_is_needed_stays(house: House) -> None:
    """Until its batch is over."""
    house.service.script = None
    async with house.client() as client:
        batch = await begin(client, [chat("a")])
        file = (await client.batches.retrieve(batch)).input_file_id
        with pytest.raises(openai.ConflictError):
            await client.files.delete(file)
        await client.batches.cancel(batch)
        await over(client, batch)
        await client.files.delete(file)


async def test_a_batch_that_is_over_needs_no_file(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as its status says so, while its log is still being shortened."""
    finish, needed = BatchLog.finish, []

    def watched_finish(log: BatchLog, ended: Ended) -> None:
        needed.extend(
            file.id for file in house.batches.files.all() if house.batches.needed(file.id)
        )
        finish(log, ended)

    monkeypatch.setattr(BatchLog, "finish", watched_finish)
    async with house.client() as client:
        batch = await over(client, await begin(client, [chat("a")]))
        await client.files.delete(batch.input_file_id)
    assert needed == []


async def test_without_a_folder_there_are_none() -> None:
    """Every endpoint says why."""
    async with openai_client(create_app(FakeService())) as client:
        for asking in (
            client.files.list(),
            client.files.retrieve("f"),
            client.files.delete("f"),
            client.files.content("f"),
            client.files.create(file=("a", b"x"), purpose="batch"),
            client.batches.list(),
            client.batches.retrieve("b"),
            client.batches.cancel("b"),
            client.batches.create(input_file_id="f", endpoint=CHATS, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError, match="directory is not set"):
                await asking
