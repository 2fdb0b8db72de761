"""A hundred clients at three boxes: the same answers, fewer loads, nothing lost in silence."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import httpx
import pytest

from tests.fleet.conftest import CATALOGUES, MODELS, Fleet
from tests.fleet.dialects import DIALECTS, Outcome, Question, ask, questions
from tests.patience import PATIENCE_SECONDS

CLIENTS = 100
ROUNDS = 2
LONGER = 4
"""Times as long are answers where switches are counted. With short ones boxes idle, and a request
for another model than the last one's is a switch, which costs nothing if both are on the device."""
MOST = 0.6
"""Of the loads of weights, and of the switches, with random routing."""


async def expected(fleet: Fleet, asked: Sequence[Question]) -> dict[Question, str]:
    """What a box says that is asked directly, a few at once."""
    turn = asyncio.Semaphore(8)
    found: dict[Question, str] = {}

    async def one(client: httpx.AsyncClient, question: Question) -> None:
        async with turn:
            outcome = await ask(client, question)
        assert outcome.text is not None, outcome.error
        found[question] = outcome.text

    clients = {model: fleet.client(fleet.holder(model).url) for model in MODELS}
    await asyncio.gather(*(one(clients[q.model], q) for q in set(asked)))
    for client in clients.values():
        await client.aclose()
    return found


async def load(
    fleet: Fleet, asked: Sequence[Question], event: Callable[[], None] | None = None
) -> tuple[list[Outcome], list[Outcome]]:
    """A hundred clients, each with its share of the questions one after the other. The event comes
    when a quarter is answered. Answers with the outcomes of requests that began before it, and of
    those that began after it."""
    before: list[Outcome] = []
    after: list[Outcome] = []
    due, happened = asyncio.Event(), asyncio.Event()

    async def client_of(client: httpx.AsyncClient, mine: Sequence[Question]) -> None:
        for question in mine:
            into = after if happened.is_set() else before
            into.append(await ask(client, question))
            if event is not None and not due.is_set() and len(before) >= len(asked) // 4:
                due.set()
                await asyncio.to_thread(event)
                happened.set()

    async with fleet.client() as client, asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*(client_of(client, asked[n::CLIENTS]) for n in range(CLIENTS)))
    assert len(before) + len(after) == len(asked)
    return before, after


def wrong(outcomes: Sequence[Outcome], known: dict[Question, str]) -> list[Outcome]:
    """Those with a text that is another one than the box's own."""
    return [o for o in outcomes if o.text is not None and o.text != known[o.question]]


def clear(outcome: Outcome) -> bool:
    """Whether an error says what has happened."""
    said = ("gave no whole answer", "shutting_down", "stopping")
    return any(words in outcome.error for words in said)


async def test_answers_are_those_of_a_box_and_models_stay_where_they_are(fleet: Fleet) -> None:
    """Random routing first, then the fleet's rule, on the same load: it saves switches, and loads
    of weights."""
    asked = questions(MODELS, CLIENTS * ROUNDS, longer=LONGER)
    known = await expected(fleet, asked)
    loads: dict[str, float] = {}
    switches: dict[str, float] = {}
    for policy in ("random", "residency_prefix"):
        fleet.deploy(policy)
        begin = fleet.loads(), fleet.switches()
        outcomes, _ = await load(fleet, asked)
        loads[policy] = fleet.loads() - begin[0]
        switches[policy] = fleet.switches() - begin[1]
        print(f"\n{policy}: {loads[policy]} loads, {switches[policy]} switches")

        assert [o.error for o in outcomes if o.text is None] == []
        assert wrong(outcomes, known) == []
        assert {o.question.dialect for o in outcomes} == set(DIALECTS)
        assert set(Counter(o.box for o in outcomes)) == set(CATALOGUES)
    assert loads["random"] > 0
    assert loads["residency_prefix"] <= MOST * loads["random"], loads
    assert switches["residency_prefix"] <= MOST * switches["random"], switches


async def test_lists_have_the_models_of_all_boxes(fleet: Fleet) -> None:
    async with fleet.client() as client:
        models = (await client.get("/v1/models")).json()["data"]
        tags = (await client.get("/api/tags")).json()["models"]
    assert [row["id"] for row in models] == list(MODELS)
    assert [row["name"] for row in tags] == [f"{name}:latest" for name in MODELS]


async def test_what_a_client_sends_reaches_the_box(fleet: Fleet) -> None:
    """Its request id comes back once; a client that hangs up cancels the request there."""
    long = Question("chat, streamed", "llama-a", "Tell me everything.", 600)
    dialect = DIALECTS[long.dialect]
    async with fleet.client() as client:
        body = dialect.body(long) | {"ignore_eos": True}
        async with client.stream(
            "POST", dialect.path, json=body, headers={"x-request-id": "it-is-mine"}
        ) as answer:
            assert answer.headers.get_list("x-request-id") == ["it-is-mine"]
            box = fleet.boxes[answer.headers["x-appliance-box"]]
            chunks = answer.aiter_raw()
            await anext(chunks)
            begun = cancelled(box.url)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while cancelled(box.url) != begun + 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # another process, which reports nothing


def cancelled(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    series = 'appliance_requests_total{model="llama-a",outcome="cancelled"} '
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(series))


@pytest.mark.parametrize("what", ["drained", "daemon killed", "node killed"])
async def test_a_box_goes_in_the_middle(fleet: Fleet, what: str) -> None:
    """Requests that begin afterwards go elsewhere; those that had begun end with a clear error, or
    well; and where the box comes back, it takes requests again."""
    asked = questions(MODELS, CLIENTS * ROUNDS, salt=len(what))
    known = await expected(fleet, asked)
    box = fleet.boxes["a"]
    events = {
        "drained": box.drain,
        "daemon killed": box.kill,
        "node killed": lambda: fleet.kill_node("a"),
    }
    before, after = await load(fleet, asked, events[what])
    if what == "node killed":
        fleet.add_node("a")
    else:
        box.end()
        box.start()
        await asyncio.to_thread(box.ready)
    await asyncio.to_thread(fleet.complete)

    lost = [o for o in before if o.text is None]
    print(f"\n{what}: of {len(before)} that had begun, {len(lost)} broke off")
    print("for example:", [o.error for o in lost][:2])
    print("those that began later were answered by", Counter(o.box for o in after))
    assert [o.error for o in lost if not clear(o)] == []
    assert [o.error for o in after if o.text is None] == []
    assert wrong([*before, *after], known) == []
    if what == "drained":
        assert lost == []

    outcomes, _ = await load(fleet, asked)
    assert [o.error for o in outcomes if o.text is None] == []
    assert box.name in {o.box for o in outcomes}
