"""Keys at the API: what they open, what they hide, how much they may ask, and whose turn it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from appliance.api.app import create_app
from appliance.api.auth import Access, scope_of
from appliance.api.service import Activity, InstanceActivity, ModelActivity, RequestActivity
from appliance.keys import Key, KeyFile, KeyRing, Scope, digest
from appliance.purpose import Purpose
from appliance.vocabulary import FinishReason, RequestClass, Slo, Task
from tests.patience import PATIENCE_SECONDS

from .fake_service import FakeGeneration, FakeService, small_tokenizer
from .serving import served

HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT = {"model": "small", "messages": HELLO, "max_tokens": 8}
CHATS = "/v1/chat/completions"
OPEN = ["/", "/livez", "/readyz", "/health", "/version"]


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class House:
    """An appliance with keys, and how it is asked."""

    def __init__(self, path: Path) -> None:
        self.file = KeyFile(path)
        self.clock = Clock()
        self.service = FakeService()
        self.service.script = lambda generation: generation.say("hello")
        self.open_metrics = False

    def add(self, name: str, **fields: Any) -> str:
        """A key; its secret."""
        secret = f"sk-{name}"
        key = Key(name=name, sha256=digest(secret), created_seconds=0.0, **fields)
        self.file.add(key)
        return secret

    def app(self, **options: Any) -> Any:
        access = Access(
            KeyRing(self.file.path),
            open_metrics=self.open_metrics,
            clock=self.clock,
            wall_clock=self.clock,
        )
        return create_app(self.service, access=access, **options)

    @asynccontextmanager
    async def client(self, secret: str | None = None, **options: Any) -> AsyncIterator[Any]:
        transport = httpx.ASGITransport(self.app(**options), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://appliance") as client:
            if secret is not None:
                client.headers["authorization"] = f"Bearer {secret}"
            yield client


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "keys.json")


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


# --- who gets in ---------------------------------------------------------------------------------


async def test_without_keys_nobody_needs_one() -> None:
    """What a client presents nevertheless is not looked at."""
    service = FakeService(lambda generation: generation.say("hello"))
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://appliance") as client:
        for headers in ({}, bearer("sk-whatever")):
            assert (await client.post(CHATS, json=CHAT, headers=headers)).status_code == 200
            assert (await client.get("/api/status", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:11500"}, 200),
        ({"host": "localhost", "origin": "http://localhost:3000"}, 200),
        ({"host": "[::1]:11500", "origin": "https://127.0.0.1"}, 200),
        ({"host": "127.0.0.1", "origin": "https://shop.example"}, 403),
        ({"host": "127.0.0.1", "origin": "null"}, 403),
        ({"host": "shop.example:11500"}, 403),
        ({"host": "127.0.0.1.shop.example"}, 403),
    ],
)
async def test_without_keys_no_page_of_another_site_is_answered(
    headers: dict[str, str], status: int
) -> None:
    """Not even by a name that was made to mean this machine; probes say what they say to all."""
    app = create_app(FakeService(), access=Access(local=True))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://appliance") as client:
        assert (await client.post("/api/verify", headers=headers)).status_code == status
        assert (await client.get("/livez", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("client", "status"),
    [
        ("127.0.0.1", 200),
        ("127.8.8.8", 200),
        ("::1", 200),
        ("::ffff:127.0.0.1", 200),
        ("::ffff:192.0.2.1", 403),
        ("192.0.2.1", 403),
        ("2001:db8::1", 403),
    ],
)
async def test_without_keys_no_other_machine_is_answered(client: str, status: int) -> None:
    """Whatever socket it came by, and whatever it calls itself."""
    app = create_app(FakeService(), access=Access(local=True))
    transport = httpx.ASGITransport(app, client=(client, 4711))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as asking:
        assert (await asking.get("/api/status")).status_code == status


async def test_activity_tells_of_no_other_models(house: House) -> None:
    """What runs, and who has how much memory, as far as the key knows them."""
    instance = InstanceActivity(
        instance=0, role="mixed", state="up", model="org/small",
        pool_bytes={"weights:small": 1, "kv:small": 2, "weights:org/small": 4, "free": 8},
    )  # fmt: skip
    activity = Activity(
        version="1",
        uptime_seconds=1.0,
        instances=(instance,),
        models=tuple(ModelActivity(model=name, state="cold") for name in ("small", "org/small")),
    )
    house.service.activity = lambda: activity  # type: ignore[method-assign]
    both = (Scope.ADMIN, Scope.INFER)
    house.add("some", models=("small",), scopes=both)
    house.add("all", scopes=both)
    async with house.client() as client:
        some, everything = [
            (await client.get("/api/status", headers=bearer(f"sk-{name}"))).json()
            for name in ("some", "all")
        ]

    assert [model["model"] for model in some["models"]] == ["small"]
    assert some["instances"][0]["pool_bytes"] == {"weights:small": 1, "kv:small": 2, "free": 8}
    assert some["instances"][0]["model"] is None
    assert everything["instances"][0]["model"] == "org/small"
    assert len(everything["models"]) == 2


async def test_with_keys_names_do_not_matter(house: House) -> None:
    """A page that has a key may use it."""
    secret = house.add("alice")
    access = Access(KeyRing(house.file.path), local=True, wall_clock=house.clock)
    transport = httpx.ASGITransport(create_app(house.service, access=access))
    headers = {**bearer(secret), "host": "box.example", "origin": "https://chat.example"}
    async with httpx.AsyncClient(transport=transport, base_url="http://appliance") as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("sk-nobody"),
        {"authorization": "Basic sk-alice"},
        {"authorization": "sk-alice"},
        {"x-api-key": "sk-nobody"},
        {"authorization": "Bearer sk-nobody", "x-api-key": "sk-alice"},
        {"authorization": b"Bearer \xff"},
    ],
)
async def test_no_valid_key_is_401(house: House, headers: Any) -> None:
    """For every endpoint that has not to be open, before its body is looked at."""
    house.add("alice", scopes=tuple(Scope))
    async with house.client() as client:
        for method, path in [("POST", CHATS), ("GET", "/v1/models"), ("GET", "/api/status"),
                             ("GET", "/metrics"), ("PUT", "/api/policies")]:  # fmt: skip
            answer = await client.request(method, path, headers=headers, content=b"{")
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"]
        for path in OPEN:
            assert (await client.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("scopes", "status", "kind"),
    [((), 401, "authentication_error"), ((Scope.ADMIN,), 403, "permission_error")],
)
async def test_who_is_not_let_in_hears_why_in_each_dialect(
    house: House, scopes: tuple[Scope, ...], status: int, kind: str
) -> None:
    """The dialect is the path's, whether it is the key or its scope that is missing."""
    secret = house.add("alice", scopes=scopes) if scopes else None
    async with house.client(secret) as client:
        message = await client.post("/v1/messages", json=CHAT)
        chat = await client.post("/api/chat", json=CHAT)

    assert (message.status_code, message.json()["error"]["type"]) == (status, kind)
    assert (chat.status_code, list(chat.json())) == (status, ["error"])
    assert "API key" in chat.json()["error"]


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
async def test_both_headers_are_understood(house: House, header: str) -> None:
    """OpenAI's and Anthropic's."""
    secret = house.add("alice")
    value = f"bearer {secret}" if header == "Authorization" else secret
    async with house.client() as client:
        assert (await client.post(CHATS, json=CHAT, headers={header: value})).status_code == 200
    assert house.service.submitted[0].request.key == "alice"


@pytest.mark.parametrize(("scope", "opens"), [(Scope.INFER, "/v1"), (Scope.ADMIN, "/api")])
async def test_scopes(house: House, scope: Scope, opens: str) -> None:
    """Each opens its own endpoints, and the other's are 403."""
    secret = house.add("alice", scopes=(scope,))
    async with house.client(secret) as client:
        for path in ("/v1/models", "/v1/models/small", "/api/status", "/api/policies", "/metrics"):
            mine = path.startswith("/v1") == (opens == "/v1")
            answer = await client.get(path)
            assert (answer.status_code == 403) == (not mine), path
            if not mine:
                assert answer.json()["error"]["code"] == "permission_denied"


def test_what_is_not_known_is_an_operator_s() -> None:
    """An endpoint that nobody thought of is not open by accident."""
    assert scope_of("/api/whatever") is Scope.ADMIN
    assert scope_of("/v1") is Scope.ADMIN
    assert scope_of("/api/chat") is Scope.INFER
    assert scope_of("/livez") is None


async def test_open_metrics(house: House) -> None:
    """Scrapers need no key where that was configured; nothing else is open by it."""
    house.open_metrics = True
    async with house.client() as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/metrics/")).status_code == 200
        assert (await client.get("/api/status")).status_code == 401


@pytest.mark.parametrize(
    "path", ["/api/status/", "//api/status", "/v1/../api/status", "/api//status"]
)
async def test_odd_paths_open_nothing(house: House, path: str) -> None:
    """What a path needs is decided by where it is routed, not by how it is written."""
    secret = house.add("alice")
    async with house.client(secret) as client:
        assert (await client.get(path)).status_code in (403, 404)


async def test_keys_come_and_go_while_it_runs(house: House) -> None:
    """Made, revoked and expired keys, from the next request on."""
    async with house.client("sk-late") as client:
        assert (await client.get("/v1/models")).status_code == 401
        house.add("late", expires_seconds=1010.0)
        assert (await client.get("/v1/models")).status_code == 200
        house.clock.now = 1010.0
        assert (await client.get("/v1/models")).status_code == 401
        house.file.remove("late")
        house.add("late")
        assert (await client.get("/v1/models")).status_code == 200


async def test_secrets_are_never_logged(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """Neither those that are valid, nor those that are not."""
    caplog.set_level(0)
    secret = house.add("alice")
    async with house.client() as client:
        for presented in (secret, "sk-mistyped"):
            await client.post(CHATS, json=CHAT, headers=bearer(presented))
            await client.post("/api/verify", headers=bearer(presented))

    assert secret not in caplog.text
    assert "sk-mistyped" not in caplog.text


# --- what a key sees -----------------------------------------------------------------------------


async def test_other_models_do_not_exist(house: House) -> None:
    """They are in no list, and asking for them is as if there were none."""
    secret = house.add("alice", models=("small",))
    async with house.client(secret) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        hidden = await client.post(CHATS, json=CHAT | {"model": "org/small"})
        missing = await client.post(CHATS, json=CHAT | {"model": "nobody/small"})
        shown = await client.get("/v1/models/org/small")
        fine = await client.post(CHATS, json=CHAT)

    assert [model["id"] for model in listed] == ["small"]
    assert (hidden.status_code, shown.status_code, fine.status_code) == (404, 404, 200)
    assert hidden.text.replace("org/", "nobody/") == missing.text


async def test_other_models_do_not_exist_for_ollama_s_clients_either(house: House) -> None:
    """Nor under the tag that is added to every name."""
    secret = house.add("alice", models=("org/small",))
    async with house.client(secret) as client:
        listed = (await client.get("/api/tags")).json()["models"]
        running = (await client.get("/api/ps")).json()["models"]
        hidden = await client.post("/api/show", json={"model": "small:latest"})
        fine = await client.post("/api/show", json={"model": "org/small:latest"})

    assert [model["name"] for model in listed] == ["org/small:latest"]
    assert running == []  # the one that runs is not hers
    assert (hidden.status_code, fine.status_code) == (404, 200)
    assert hidden.json() == {"error": "model 'small:latest' not found"}


async def test_classes(house: House) -> None:
    """Batch work is refused to a key that has none, and is all that a key for it has."""
    waking, batch = RequestClass.INTERACTIVE, RequestClass.BATCH
    house.add("both")
    house.add("waking", classes=(waking,))
    house.add("batch", classes=(batch,))
    flex = CHAT | {"service_tier": "flex"}
    async with house.client() as client:
        answers = [
            (await client.post(CHATS, json=body, headers=bearer(f"sk-{name}"))).status_code
            for name in ("both", "waking", "batch")
            for body in (CHAT, flex)
        ]

    assert answers == [200, 200, 200, 403, 200, 200]
    classes = [generation.request.request_class for generation in house.service.submitted]
    assert classes == [waking, batch, waking, batch, batch]


async def test_a_request_s_own_service_level(house: House) -> None:
    """Where the key allows it; what the header does not say is the model's."""
    house.add("plain")
    house.add("chosen", slo=True)
    promised = Slo(ttft_seconds=10.0, tbt_seconds=0.1)
    async with house.client() as client:

        async def ask(name: str, value: str) -> httpx.Response:
            headers = {**bearer(f"sk-{name}"), "x-slo": value}
            answer: httpx.Response = await client.post(CHATS, json=CHAT, headers=headers)
            return answer

        assert (await ask("plain", "ttft=2s")).status_code == 403
        for value in ("ttft=2s", "tbt=50ms", "tbt=20ms, ttft=1m"):
            assert (await ask("chosen", value)).status_code == 200
        for value in ("", "ttft", "ttft=2", "ttft=0s", "ttft=1s,ttft=2s", "speed=1s"):
            refused = await ask("chosen", value)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-slo"), value

    asked = [generation.request.slo.over(promised) for generation in house.service.submitted]
    assert asked == [
        Slo(ttft_seconds=2.0, tbt_seconds=0.1),
        Slo(ttft_seconds=10.0, tbt_seconds=0.05),
        Slo(ttft_seconds=60.0, tbt_seconds=0.02),
    ]


# --- how much it may ask -------------------------------------------------------------------------


async def test_requests_per_minute(house: House) -> None:
    """One more than the limit is 429, with when to try again; the headers say what is left."""
    secret = house.add("alice", requests_per_minute=2)
    async with house.client(secret) as client:
        first, second, third = [await client.post(CHATS, json=CHAT) for _ in range(3)]
        models = await client.get("/v1/models")
        house.clock.now += 30.0
        later = await client.post(CHATS, json=CHAT)

    left = [answer.headers["x-ratelimit-remaining-requests"] for answer in (first, second, third)]
    assert left == ["1", "0", "0"]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert second.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert (third.status_code, third.headers["retry-after"]) == (429, "30")
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    assert "2 requests per minute" in third.json()["error"]["message"]
    assert (models.status_code, later.status_code) == (200, 200)


async def test_tokens_per_minute_are_settled(house: House) -> None:
    """A request takes its prompt and its longest answer, and gives back what it did not need."""
    secret = house.add("alice", tokens_per_minute=100)
    prompt = len(small_tokenizer().render_chat(HELLO))
    said = len(small_tokenizer().encode("hello"))
    async with house.client(secret) as client:
        answer = await client.post(CHATS, json=CHAT | {"max_tokens": 80})
        other = await client.post(CHATS, json=CHAT | {"max_tokens": 100 - prompt})

    assert answer.status_code == 200
    assert answer.json()["usage"]["total_tokens"] == prompt + said
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(100 - prompt - said)
    assert (other.status_code, other.headers["retry-after"]) == (
        429,
        str(-(-(prompt + said) * 6 // 10)),
    )
    assert "100 tokens per minute" in other.json()["error"]["message"]
    assert other.headers["x-ratelimit-limit-tokens"] == "100"
    assert len(house.service.submitted) == 1


async def test_choices_reserve_together_or_not_at_all(house: House) -> None:
    """When the last of them finds no tokens left, the others are not generated either."""
    secret = house.add("alice", tokens_per_minute=300)
    house.service.script = None
    async with house.client(secret) as client:
        running = asyncio.create_task(client.post(CHATS, json=CHAT | {"max_tokens": 150}))
        generation = await house.service.arrivals.get()
        answer = await client.post(CHATS, json=CHAT | {"n": 4, "max_tokens": 30})
        generation.say("hello")

        assert (await running).status_code == 200
    assert answer.status_code == 429
    _, *choices = house.service.submitted
    assert len(choices) == 2
    assert all(choice.reason is FinishReason.CANCELLED for choice in choices)


async def test_concurrency(house: House) -> None:
    """Counts what is being answered, and no more."""
    secret = house.add("alice", concurrency=1)
    house.service.script = None
    async with house.client(secret) as client:
        running = asyncio.create_task(client.post(CHATS, json=CHAT))
        generation = await house.service.arrivals.get()
        refused = await client.post(CHATS, json=CHAT)
        generation.say("hello")
        done = await running
        again = asyncio.create_task(client.post(CHATS, json=CHAT))
        (await house.service.arrivals.get()).say("hello")

        assert (done.status_code, (await again).status_code) == (200, 200)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "1 requests at once" in refused.json()["error"]["message"]


async def test_who_does_not_read_makes_room(house: House) -> None:
    """With a key, too."""
    secret = house.add("alice")
    house.service.script = None
    async with served(house.app()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.pause_reading()
        body = json.dumps({**CHAT, "stream": True}).encode()
        head = f"POST {CHATS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n"
        head += "Connection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        generation = await house.service.arrivals.get()
        await generation.say_until_unread("hello")
        writer.transport.resume_reading()
        generation.say("hello")
        answer = await reader.read()
        writer.close()

    assert answer.count(b"data: [DONE]") == 1
    assert generation.reads == [False, True]


async def test_many_texts_are_embedded_one_after_another(house: House) -> None:
    """A key for one request at a time has vectors of many texts; its tokens are the texts'."""
    secret = house.add("alice", concurrency=1, tokens_per_minute=100)
    house.service.learn("embedder", Purpose(task=Task.EMBED, dimensions=1))
    house.service.script = lambda generation: generation.pool([1.0])
    async with house.client(secret) as client:
        asked = {"model": "embedder", "input": [[5, 6, 7]] * 10}
        answer = await client.post("/v1/embeddings", json=asked)

    assert len(answer.json()["data"]) == 10
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(100 - 30)


@pytest.mark.parametrize(
    ("texts", "before", "status"), [(40, 0, 200), (41, 0, 400), (40, 1, 429), (1, 0, 200)]
)
async def test_texts_are_computed_together_or_not_at_all(
    house: House, texts: int, before: int, status: int
) -> None:
    """More of them than a key has tokens, for a minute or for now: nothing is used up."""
    house.add("alice", tokens_per_minute=120)
    house.service.learn("embedder", Purpose(task=Task.EMBED, dimensions=1))
    house.service.script = lambda generation: generation.pool([1.0])
    async with house.client("sk-alice") as client:
        asked = {"model": "embedder", "input": [[5, 6, 7]] * texts}
        for _ in range(before):
            await client.post("/v1/embeddings", json=asked | {"input": [5, 6, 7]})
        answer = await client.post("/v1/embeddings", json=asked)

    assert answer.status_code == status, answer.text
    if status != 200:
        assert len(house.service.submitted) == before
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(120 - 3 * before)
    if status == 400:
        assert answer.json()["error"]["code"] == "token_limit_exceeded"


async def test_texts_that_are_begun_are_answered(house: House) -> None:
    """What the key asked for meanwhile makes the rest of them wait for its tokens."""
    house.add("alice", tokens_per_minute=6000)
    house.service.learn("embedder", Purpose(task=Task.EMBED, dimensions=1))
    house.service.script = None
    async with house.client("sk-alice") as client:

        def ask(texts: int, tokens: int) -> asyncio.Task[httpx.Response]:
            asked = {"model": "embedder", "input": [[5] * tokens] * texts}
            return asyncio.create_task(client.post("/v1/embeddings", json=asked))

        many = ask(33, 3)
        begun = [await house.service.arrivals.get() for _ in range(32)]
        others = [ask(1, 196) for _ in range(30)] + [ask(1, 23)]  # all that is left but one
        begun += [await house.service.arrivals.get() for _ in others]
        for generation in begun:
            generation.pool([1.0])
        await asyncio.gather(*others)
        await settled()
        assert not many.done()
        house.clock.now += 1.0
        (await house.service.arrivals.get()).pool([1.0])

        assert len((await many).json()["data"]) == 33


async def test_who_hangs_up_gives_back(house: House) -> None:
    """A stream that its client leaves counts for what came of it, and its place is free."""
    secret = house.add("alice", concurrency=1, tokens_per_minute=100)
    house.service.script = None
    prompt = len(small_tokenizer().render_chat(HELLO))
    async with (
        served(house.app()) as port,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", headers=bearer(secret), timeout=PATIENCE_SECONDS
        ) as client,
    ):
        body = CHAT | {"stream": True, "max_tokens": 70}
        async with client.stream("POST", CHATS, json=body) as stream:
            generation = await house.service.arrivals.get()
            generation.feed(small_tokenizer().encode("hello"))
            await anext(line async for line in stream.aiter_lines() if "hel" in line)
        await generation.cancelled.wait()
        await settled()
        again = asyncio.create_task(client.post(CHATS, json=CHAT))
        (await house.service.arrivals.get()).say("hello")
        answer = await again

    assert answer.status_code == 200
    said = len(small_tokenizer().encode("hello"))
    left = 100 - 2 * (prompt + said)
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(left)


async def test_limits_are_a_key_s_own(house: House) -> None:
    """And survive a change of other keys, but not one of themselves."""
    alice = house.add("alice", requests_per_minute=1)
    async with house.client() as client:

        async def ask(secret: str) -> int:
            answer = await client.post(CHATS, json=CHAT, headers=bearer(secret))
            return int(answer.status_code)

        assert [await ask(alice), await ask(alice)] == [200, 429]
        bob = house.add("bob", requests_per_minute=1)
        assert [await ask(bob), await ask(bob), await ask(alice)] == [200, 429, 429]
        house.file.remove("alice")
        house.add("alice", requests_per_minute=2)
        assert await ask(alice) == 200


# --- whose turn it is ----------------------------------------------------------------------------


class Full:
    """An appliance with room for one request at a time."""

    def __init__(self, house: House) -> None:
        self.service = house.service
        self.service.room = 1
        self.service.script = None
        self._taken = 0

    async def next(self) -> FakeGeneration:
        self._taken += 1
        return await self.service.arrivals.get()

    def done(self, generation: FakeGeneration) -> None:
        """It ends, which makes room for one more."""
        self.service.room = self._taken + 1
        generation.say("hello")


async def test_keys_take_turns_when_it_is_full(house: House) -> None:
    """One who asks for much waits behind one who asks for little; nobody is refused."""
    house.add("many")
    house.add("few")
    full = Full(house)
    async with house.client() as client:

        def ask(name: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(client.post(CHATS, json=CHAT, headers=bearer(f"sk-{name}")))

        asked = [ask("many")]
        generation = await full.next()
        asked += [ask("many") for _ in range(4)]
        await asyncio.sleep(0)
        asked += [ask("few") for _ in range(2)]
        await settled()
        order = []
        for _ in range(6):
            full.done(generation)
            generation = await full.next()
            order.append(generation.request.key)
        full.done(generation)
        answers = await asyncio.gather(*asked)

    assert [answer.status_code for answer in answers] == [200] * 7
    assert sorted(order[:4]) == ["few", "few", "many", "many"]
    assert order[4:] == ["many", "many"]


async def settled() -> None:
    """Let everything happen that can."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_waiting_is_bounded_for_each_key(house: House) -> None:
    """One more than may wait is 429; who hangs up makes room for another."""
    house.add("alice")
    house.add("bob")
    full = Full(house)
    async with house.client(max_waiting=1) as client:

        def ask(name: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(client.post(CHATS, json=CHAT, headers=bearer(f"sk-{name}")))

        running = ask("alice")
        generation = await full.next()
        waits = ask("alice")
        await settled()
        refused = await ask("alice")
        others = ask("bob")
        await settled()
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        again = ask("alice")
        await settled()
        for _ in range(2):
            full.done(generation)
            generation = await full.next()
        full.done(generation)
        statuses = [(await task).status_code for task in (running, others, again)]

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert refused.headers["retry-after"] == "1"
    assert statuses == [200, 200, 200]
    assert [g.request.key for g in house.service.submitted] == ["alice", "bob", "alice"]


async def test_room_that_nobody_told_of_is_found(house: House) -> None:
    """Others use the appliance, too: who waits tries again."""
    house.add("alice")
    house.service.room = 0
    async with house.client("sk-alice") as client:
        asked = asyncio.create_task(client.post(CHATS, json=CHAT))
        await settled()
        house.service.room = 1
        assert (await asked).status_code == 200


async def test_what_fails_at_its_turn_fails_alone(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that went meanwhile: it was there when it was asked, and that is what is told."""
    house.add("alice")
    full = Full(house)
    async with house.client("sk-alice") as client:
        running = asyncio.create_task(client.post(CHATS, json=CHAT))
        generation = await full.next()
        waits = asyncio.create_task(client.post(CHATS, json=CHAT))
        await settled()
        del house.service._cards["small"]
        monkeypatch.setattr(house.service, "submit", lambda request: house.service.model("small"))
        full.done(generation)
        assert (await running).status_code == 200
        refused = await waits

    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_removed")


class Asked(FakeService):
    """Tells of the requests that it was given."""

    def requests(self) -> list[RequestActivity]:
        return [
            RequestActivity(
                id=generation.id,
                model=generation.request.model,
                request_class=generation.request.request_class,
                phase="running",
                age_seconds=1000.0,
                prompt_tokens=1,
                output_tokens=0,
                max_tokens=1,
            )
            for generation in self.submitted
        ]


async def test_who_waits_is_shown_and_can_be_ended(house: House) -> None:
    """As any other request: listed, with its reason, and its client is told when it is ended."""
    house.add("alice")
    operator = house.add("operator", scopes=(Scope.ADMIN,))
    house.service = Asked()
    full = Full(house)
    async with house.client("sk-alice") as client:
        running = asyncio.create_task(client.post(CHATS, json=CHAT))
        generation = await full.next()
        waits = asyncio.create_task(client.post(CHATS, json=CHAT))
        await settled()
        house.clock.now += 7.0
        listed = (await client.get("/api/requests", headers=bearer(operator))).json()["requests"]
        path = f"/api/requests/{listed[1]['id']}"
        found = (await client.get(path, headers=bearer(operator))).json()
        ended = await client.delete(path, headers=bearer(operator))
        told = await waits
        full.done(generation)

        assert (await running).status_code == 200
    assert [one["phase"] for one in listed] == ["running", "waiting"]
    assert (found["reason"]["code"], found["age_seconds"]) == ("turn", 7.0)
    assert ended.json()["cancelled"]["id"] == listed[1]["id"]
    assert (told.status_code, told.json()["error"]["code"]) == (499, "cancelled")


async def test_waiting_has_an_end(house: House) -> None:
    """Who had no turn in time is told to try again, and has used nothing up."""
    house.add("alice", tokens_per_minute=1000)
    house.service.room = 0
    async with house.client("sk-alice", max_wait_seconds=0.01) as client:
        refused = await client.post(CHATS, json=CHAT)
        house.service.room = 1
        answer = await client.post(CHATS, json=CHAT)

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert refused.headers["retry-after"] == "1"
    assert answer.status_code == 200
    assert len(house.service.submitted) == 1


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"n": 2}, 200), ({"n": 3}, 400), ({"max_tokens": 150}, 200)],
)
async def test_what_can_never_fit_is_refused(
    house: House, fields: dict[str, object], status: int
) -> None:
    """Several choices that together may need more than a minute's worth: not 429, for ever."""
    prompt = len(small_tokenizer().render_chat(HELLO))
    secret = house.add("alice", tokens_per_minute=2 * (prompt + 8))
    async with house.client(secret) as client:
        answer = await client.post(CHATS, json=CHAT | fields)
        again = await client.post(CHATS, json=CHAT | {"max_tokens": 1})

    assert answer.status_code == status
    if status == 400:
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("n", "token_limit_exceeded")
        assert again.status_code == 200  # nothing was used up


async def test_what_a_key_had_is_in_the_metrics(house: House) -> None:
    """By the names of the keys that there are, not by their secrets; revoked keys are forgotten."""
    alice = house.add("alice", requests_per_minute=2)
    bob = house.add("bob")
    house.add("operator", scopes=(Scope.ADMIN,))
    prompt = len(small_tokenizer().render_chat(HELLO))
    said = len(small_tokenizer().encode("hello"))
    async with house.client("sk-operator") as client:

        async def scraped() -> list[str]:
            lines = (await client.get("/metrics")).text.splitlines()
            return [line for line in lines if line.startswith("appliance_key_")]

        for _ in range(3):
            await client.post(CHATS, json=CHAT, headers=bearer(alice))
        await client.post(CHATS, json=CHAT | {"n": 2}, headers=bearer(bob))
        both = "\n".join(await scraped())
        house.file.remove("alice")
        left = "\n".join(await scraped())

    assert 'appliance_key_requests_total{key="alice"} 2.0' in both
    assert f'appliance_key_tokens_total{{key="alice",kind="prompt"}} {2 * prompt}.0' in both
    assert f'appliance_key_tokens_total{{key="alice",kind="output"}} {2 * said}.0' in both
    assert 'appliance_key_refusals_total{key="alice",limit="requests"} 1.0' in both
    assert 'appliance_key_requests_total{key="bob"} 2.0' in both
    assert alice not in both
    assert digest(alice) not in both
    assert "alice" not in left
    assert "bob" in left


async def test_who_waits_is_counted_when_it_is_asked(house: House) -> None:
    """Also of a key that was revoked, and made again, meanwhile."""
    house.add("alice")
    operator = house.add("operator", scopes=(Scope.ADMIN,))
    full = Full(house)
    async with house.client("sk-alice") as client:

        async def waiting() -> list[str]:
            lines = (await client.get("/metrics", headers=bearer(operator))).text.splitlines()
            return [line for line in lines if line.startswith('appliance_key_waiting{key="alice"}')]

        asked = [asyncio.create_task(client.post(CHATS, json=CHAT))]
        generation = await full.next()
        asked += [asyncio.create_task(client.post(CHATS, json=CHAT)) for _ in range(2)]
        await settled()
        before = await waiting()
        house.file.remove("alice")
        revoked = await waiting()
        house.add("alice")
        asked.append(asyncio.create_task(client.post(CHATS, json=CHAT)))
        await settled()
        again = await waiting()
        for _ in range(3):
            full.done(generation)
            generation = await full.next()
        full.done(generation)
        await asyncio.gather(*asked)
        after = await waiting()

    counts = [[line.split()[1] for line in lines] for lines in (before, revoked, again, after)]
    assert counts == [["2.0"], [], ["3.0"], ["0.0"]]


# --- the official client -------------------------------------------------------------------------


@pytest.fixture
async def connect(house: House) -> AsyncIterator[Callable[[str], openai.AsyncOpenAI]]:
    async with served(house.app()) as port:
        clients = []

        def make(secret: str) -> openai.AsyncOpenAI:
            url = f"http://127.0.0.1:{port}/v1"
            clients.append(openai.AsyncOpenAI(base_url=url, api_key=secret, max_retries=0))
            return clients[-1]

        yield make
        for client in clients:
            await client.close()


async def test_the_official_client_knows_the_errors(
    house: House, connect: Callable[[str], openai.AsyncOpenAI]
) -> None:
    """Each has its class there."""
    house.add("good", requests_per_minute=2, models=("small",))
    house.add("operator", scopes=(Scope.ADMIN,))
    good = connect("sk-good")

    with pytest.raises(openai.AuthenticationError):
        await connect("sk-wrong").models.list()
    with pytest.raises(openai.PermissionDeniedError):
        await connect("sk-operator").models.list()
    with pytest.raises(openai.NotFoundError):
        await good.chat.completions.create(model="org/small", messages=HELLO)
    stream = await good.chat.completions.create(model="small", messages=HELLO, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "hello"
    with pytest.raises(openai.RateLimitError) as caught:
        await good.chat.completions.create(model="small", messages=HELLO)
    assert int(caught.value.response.headers["retry-after"]) > 0
    assert json.loads(caught.value.response.text)["error"]["type"] == "rate_limit_error"
