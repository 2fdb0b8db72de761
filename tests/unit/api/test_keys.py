"""Keys at the API: what they open, what they hide, how much they may ask, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from appliance.access.admission import Admission
from appliance.access.auth import Access, scope_of
from appliance.access.keys import Key, KeyFile, KeyRing, Scope, digest
from appliance.api.app import create_app
from appliance.gateway.sessions import FrontSettings, Sessions
from appliance.service.front_frames import Refused
from appliance.service.interface import (
    Activity,
    InstanceActivity,
    ModelActivity,
    ModelCard,
    ModelNotFound,
    RequestActivity,
)
from tests.unit.doubles.fake_service import FakeService, encode
from tests.unit.doubles.front import FrontDouble

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
        self.open_metrics = False

    def add(self, name: str, **fields: Any) -> str:
        """A key; its secret."""
        secret = f"sk-{name}"
        key = Key(name=name, sha256=digest(secret), created_seconds=0.0, **fields)
        self.file.add(key)
        return secret

    def app(self) -> Any:
        """The core's application, beside a front end."""
        access = Access(
            KeyRing(self.file.path),
            open_metrics=self.open_metrics,
            clock=self.clock,
            wall_clock=self.clock,
        )
        admission = Admission(self.service, access)  # type: ignore[arg-type]
        settings = FrontSettings(keep_alive_seconds=5.0, max_body_bytes=1000)
        self.front = FrontDouble(Sessions(self.service, access, admission, settings))  # type: ignore[arg-type]
        return create_app(self.service, access=access, admission=admission)  # type: ignore[arg-type]

    @asynccontextmanager
    async def client(self, secret: str | None = None) -> AsyncIterator[Any]:
        transport = httpx.ASGITransport(self.app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://appliance") as client:
            if secret is not None:
                client.headers["authorization"] = f"Bearer {secret}"
            yield client

    async def ask(self, secret: str) -> int:
        """Have a front end ask for "hello" with a key; the status of the answer."""
        entered = self.front.enter(x_api_key=secret)
        if isinstance(entered, Refused):
            return entered.status
        name = f"request-{entered.call}"
        self.front.submit(entered.call, name)
        await asyncio.sleep(0)
        self.service.live[name].say("hello")
        await self.front.until_over(name)
        self.front.leave(entered.call)
        return 200


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "keys.json")


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


# --- who gets in ---------------------------------------------------------------------------------


async def test_without_keys_no_client_needs_one() -> None:
    """What a client presents nevertheless is not looked at."""
    transport = httpx.ASGITransport(create_app(FakeService()))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://appliance") as client:
        for headers in ({}, bearer("sk-whatever")):
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
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
        ({"host": "host.docker.internal:11500"}, 403),
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
    ("headers", "remedy"),
    [
        ({"host": "host.docker.internal:11500"}, "set api.keys and send a key, or ask localhost"),
        ({"host": "localhost", "origin": "https://chat.example"}, "is not in api.origins"),
    ],
)
async def test_what_is_refused_without_keys_says_what_to_do(
    headers: dict[str, str], remedy: str
) -> None:
    app = create_app(FakeService(), access=Access(local=True))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://appliance") as client:
        answer = await client.get("/v1/models", headers=headers)

    assert answer.status_code == 403
    assert remedy in answer.json()["error"]["message"]


async def test_with_keys_the_appliance_has_any_name(house: House) -> None:
    """Such as the one that containers have for their host."""
    key = bearer(house.add("webui"))
    async with house.client() as client:
        headers = key | {"host": "host.docker.internal:11500"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


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


async def test_a_key_of_an_adapter_is_told_whether_it_is_loaded(house: House) -> None:
    """Which is so when its base is; keys of other models are not told."""
    base, *others = house.service.models()
    adapter = msgspec.structs.replace(base, id=f"{base.id}:legal", base=base.id)
    house.service.models = lambda: [base, adapter, *others]  # type: ignore[method-assign]
    loaded = ModelActivity(model=base.id, state="idle", residency={"0": "loaded"})
    activity = Activity(version="1", uptime_seconds=1.0, instances=(), models=(loaded,))
    house.service.activity = lambda: activity  # type: ignore[method-assign]
    one = house.add("one", models=(adapter.id,))
    other = house.add("other", models=(f"{base.id}:polite",))
    async with house.client() as client:
        listed = [
            [model["name"] for model in answer.json()["models"]]
            for secret in (one, other)
            if (answer := await client.get("/api/ps", headers=bearer(secret)))
        ]

    assert listed == [[adapter.id], []]


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
        bearer("sk-alic"),
        bearer("sk-alice2"),
        bearer("sk-nobody' OR name = 'alice' --"),
        bearer("{{ 7 * 7 }}"),
    ],
)
async def test_no_valid_key_is_401(house: House, headers: Any) -> None:
    """For every endpoint that has not to be open, before its body is looked at."""
    house.add("alice", scopes=tuple(Scope))
    async with house.client() as client:
        for method, path in [("POST", "/v1/batches"), ("GET", "/v1/models"), ("GET", "/api/status"),
                             ("GET", "/metrics"), ("PUT", "/api/policies")]:  # fmt: skip
            answer = await client.request(method, path, headers=headers, content=b"{")
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"]
        for path in OPEN:
            assert (await client.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
async def test_both_headers_are_understood(house: House, header: str) -> None:
    """OpenAI's and Anthropic's."""
    secret = house.add("alice")
    value = f"bearer {secret}" if header == "Authorization" else secret
    async with house.client() as client:
        assert (await client.get("/v1/models", headers={header: value})).status_code == 200


@pytest.mark.parametrize(
    ("scope", "opens"),
    [(Scope.INFER, "/v1"), (Scope.ADMIN, "/api /metrics"), (Scope.OBSERVE, "/api/load /metrics")],
)
async def test_scopes(house: House, scope: Scope, opens: str) -> None:
    """Each opens its own endpoints, and the others' are 403; what observers read, admins may."""
    secret = house.add("alice", scopes=(scope,))
    async with house.client(secret) as client:
        for path in ("/v1/models", "/v1/models/small", "/api/status", "/api/load", "/metrics"):
            mine = path.startswith(tuple(opens.split()))
            answer = await client.get(path)
            assert (answer.status_code == 403) == (not mine), path
            if not mine:
                assert answer.json()["error"]["code"] == "permission_denied"


def test_what_is_not_known_is_an_operator_s() -> None:
    """An endpoint that nobody thought of is not open by accident."""
    assert scope_of("/api/whatever") is Scope.ADMIN
    assert scope_of("/api/load/more") is Scope.ADMIN
    assert scope_of("/v1") is Scope.ADMIN
    assert scope_of("/v1/load_lora_adapter") is Scope.ADMIN
    assert scope_of("/v1/unload_lora_adapter") is Scope.ADMIN
    assert scope_of("/api/chat") is Scope.INFER
    assert scope_of("/livez") is None


async def test_load_tells_of_no_other_models(house: House) -> None:
    """Names that the key does not know are in no list, and `version` is of those it knows."""
    limited = house.add("a", scopes=(Scope.OBSERVE,), models=("small",))
    whole = house.add("b", scopes=(Scope.OBSERVE,))
    house.service.waiting = {"small": 2, "org/small": 1}
    answers = []
    for secret in (limited, whole):
        async with house.client(secret) as client:
            answers.append((await client.get("/api/load")).json())

    assert answers[0]["catalogue"] == ["small"] == answers[0]["resident"] == answers[0]["host"]
    assert answers[0]["coming"] == []
    counts = ("asked_models", "resident_models", "coming_models")
    assert [answers[0][count] for count in counts] == [1, 1, 0]
    assert [answers[1][count] for count in counts] == [2, 1, 1]
    assert answers[0]["waiting_by_model"] == {"small": 2}
    assert answers[1]["waiting_by_model"] == {"small": 2, "org/small": 1}
    assert answers[0]["requests_by_model"] == {"small": 2}
    assert answers[1]["requests_by_model"] == {"small": 2, "org/small": 1}
    assert answers[1]["catalogue"] == ["small", "org/small"]
    assert answers[0]["version"] != answers[1]["version"]


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


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "appliance/livez?"},
        {"host": "appliance/livez#"},
        {"host": "appliance\\@livez"},
        {"x-original-url": "/livez"},
        {"x-rewrite-url": "/livez"},
        {"x-forwarded-prefix": "/livez"},
        {"x-forwarded-for": "127.0.0.1"},
    ],
    ids=str,
)
async def test_no_header_decides_what_a_path_needs(house: House, headers: dict[str, str]) -> None:
    """Nor makes anyone an operator; a host that is none is refused as such."""
    secret = house.add("alice")
    async with house.client() as client:
        without = await client.get("/api/status", headers=headers)
        inferring = await client.get("/api/status", headers=headers | bearer(secret))

    assert without.status_code in (400, 401)
    assert inferring.status_code in (400, 403)


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
            await client.get("/v1/models", headers=bearer(presented))
            await client.post("/api/verify", headers=bearer(presented))

    assert secret not in caplog.text
    assert "sk-mistyped" not in caplog.text


# --- what a key sees -----------------------------------------------------------------------------


async def test_other_models_do_not_exist(house: House) -> None:
    """In no list, and by no name, for the clients of OpenAI, of Anthropic and of Ollama."""
    secret = house.add("alice", models=("small",))
    async with house.client(secret) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        shown = await client.get("/v1/models/org/small")
        tagged = (await client.get("/v1/models/small:latest")).json()
        anthropic = {"anthropic-version": "2023-06-01"}
        theirs = (await client.get("/v1/models", headers=anthropic)).json()
        tags = (await client.get("/api/tags")).json()["models"]

    assert [model["id"] for model in listed] == ["small"]
    assert (shown.status_code, shown.json()["error"]["code"]) == (404, "model_not_found")
    assert tagged["id"] == "small"
    assert theirs == {
        "data": [
            {
                "type": "model",
                "id": "small",
                "display_name": "small",
                "created_at": "2023-11-14T22:13:20Z",
            }
        ],
        "has_more": False,
        "first_id": "small",
        "last_id": "small",
    }
    assert [model["name"] for model in tags] == ["small:latest"]


class Aliased(FakeService):
    """Has an alias for each of its models."""

    def models(self) -> list[ModelCard]:
        cards = super().models()
        return [*cards, *(msgspec.structs.replace(c, id=f"my/{c.id}", root=c.id) for c in cards)]

    def model(self, name: str) -> ModelCard:
        for card in self.models():
            if card.id == name:
                return card
        raise ModelNotFound(name)


async def test_a_key_may_ask_for_its_models_by_their_aliases(house: House) -> None:
    """And for no other model by one."""
    house.service = Aliased()
    secret = house.add("alice", models=("small",))
    async with house.client(secret) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        found = await client.get("/v1/models/my/small")
        hidden = await client.get("/v1/models/my/org/small")

    assert [model["id"] for model in listed] == ["small", "my/small"]
    assert (found.json()["id"], found.json()["root"]) == ("my/small", "small")
    assert hidden.status_code == 404


# --- what operators see of keys ------------------------------------------------------------------


class Asked(FakeService):
    """Lists what was asked of it."""

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
            for generation in self.live.values()
        ]


async def test_who_waits_is_shown_and_can_be_ended(house: House) -> None:
    """As any other request: listed, with its reason, and its client is told when it is ended."""
    alice = house.add("alice")
    operator = house.add("operator", scopes=(Scope.ADMIN,))
    house.service = Asked()
    house.service.at_once = 1
    async with house.client(operator) as client:
        call = house.front.call(alice)
        house.front.submit(call, "runs")
        house.front.submit(call, "waits")
        house.clock.now += 7.0
        listed = (await client.get("/api/requests")).json()["requests"]
        found = (await client.get("/api/requests/waits")).json()
        ended = await client.delete("/api/requests/waits")

    assert [(one["id"], one["phase"]) for one in listed] == [
        ("runs", "running"),
        ("waits", "waiting"),
    ]
    assert (found["reason"]["code"], found["age_seconds"]) == ("turn", 7.0)
    assert ended.json()["cancelled"]["id"] == "waits"
    told = house.front.refused["waits"]
    assert (told.status, told.code) == (499, "cancelled")


async def test_what_a_key_had_is_in_the_metrics(house: House) -> None:
    """By the names of the keys that there are, not by their secrets; revoked keys are forgotten."""
    alice = house.add("alice", requests_per_minute=2)
    bob = house.add("bob")
    operator = house.add("operator", scopes=(Scope.ADMIN,))
    house.service.script = lambda generation: generation.say("hello")
    async with house.client(operator) as client:

        async def scraped() -> str:
            lines = (await client.get("/metrics")).text.splitlines()
            return "\n".join(line for line in lines if line.startswith("appliance_key_"))

        front = house.front
        for name in ("a", "b"):
            front.submit(front.call(alice), name, "hi")
        front.enter(x_api_key=alice)
        front.submit(front.call(bob), "c", "hi")
        await front.until_over("a", "b", "c")
        both = await scraped()
        house.file.remove("alice")
        left = await scraped()

    said = len(encode("hello"))
    assert 'appliance_key_requests_total{key="alice"} 2.0' in both
    assert 'appliance_key_tokens_total{key="alice",kind="prompt"} 4.0' in both
    assert f'appliance_key_tokens_total{{key="alice",kind="output"}} {2 * said}.0' in both
    assert 'appliance_key_rejections_total{key="alice",limit="requests"} 1.0' in both
    assert 'appliance_key_requests_total{key="bob"} 1.0' in both
    assert alice not in both
    assert digest(alice) not in both
    assert "alice" not in left
    assert "bob" in left


async def test_who_waits_is_counted_when_it_is_asked(house: House) -> None:
    """Also of a key that was revoked, and made again, meanwhile."""
    alice = house.add("alice")
    operator = house.add("operator", scopes=(Scope.ADMIN,))
    house.service.at_once = 0
    async with house.client(operator) as client:

        async def waiting() -> list[str]:
            lines = (await client.get("/metrics")).text.splitlines()
            told = [one for one in lines if one.startswith('appliance_key_waiting{key="alice"}')]
            return [one.split()[1] for one in told]

        call = house.front.call(alice)
        for name in ("a", "b"):
            house.front.submit(call, name)
        before = await waiting()
        house.file.remove("alice")
        revoked = await waiting()
        house.add("alice")
        house.front.submit(house.front.call(alice), "c")
        again = await waiting()
        house.front.abort("a", "b", "c")
        after = await waiting()

    assert [before, revoked, again, after] == [["2.0"], [], ["3.0"], ["0.0"]]
