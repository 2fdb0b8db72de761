"""What each view of the dashboard shows of a pool that works, what its keys do, how it looks.

Pictures are compared to the last colour; `--update-snapshots` writes what there is to see now."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from tests.unit.tui.bench import (
    NOW,
    Told,
    click,
    command,
    compare,
    dashboard,
    delta,
    model,
    press,
    request,
    screen,
    seen,
    settle,
    state,
    tree,
)
from tests.unit.tui.scenes import MODELS, loaded, maps, slabs
from tui.app import KEYS
from tui.drawing.theme import THEMES
from tui.messages import DaemonRefused
from tui.recording import read_recording
from tui.views import VIEWS

SNAPSHOTS = Path(__file__).parent / "snapshots"
DEMO = Path(__file__).parent / "sessions" / "demo.jsonl"
SIZES = ((80, 24), (160, 48))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("view", [view.names[0] for view in VIEWS])
async def test_it_looks_like_this(
    view: str, size: tuple[int, int], pytestconfig: pytest.Config
) -> None:
    """Every view in two sizes; the overview in every theme, as the others have the same colours."""
    async with dashboard(loaded(), size=size) as app:
        app.show_view(view)
        await settle(app)
        for theme in THEMES if view == "overview" else [app.theme]:
            app.theme = theme
            await settle(app)
            name = f"{view}-{size[0]}x{size[1]}-{theme}.svg"
            compare(app, SNAPSHOTS / name, update=pytestconfig.getoption("--update-snapshots"))


@pytest.mark.parametrize("view", ["overview", "timeline", "models"])
async def test_a_session_of_the_demo(view: str, pytestconfig: pytest.Config) -> None:
    """Ten seconds of the six models of `appliance demo` under load, as they were recorded."""
    session = Told(*(one._replace(at=NOW) for one in read_recording(DEMO)), live=False)
    async with dashboard(session, size=(120, 36)) as app:
        await command(app, view)
        assert "2/2 up" in screen(app)[0]
        name = f"demo-{view}.svg"
        compare(app, SNAPSHOTS / name, update=pytestconfig.getoption("--update-snapshots"))


async def test_the_overview_says_it_all() -> None:
    """Promises, tokens, who waits; and of instances what runs, how busy they are, their memory."""
    async with dashboard(loaded(), size=(120, 30)) as app:
        page = seen(app)
        for words in (
            "tokens/s", "3 waiting, oldest 30s", "90GiB of 128GiB", "0 mixed", "up qwen-a",
            "90% busy", "switches/s", "1GiB/s moved", "61°C 405 W", "49GiB of 68GiB",
            "llama-a 20GiB",
        ):  # fmt: skip
            assert words in page
        bar = next(line for line in screen(app) if "49GiB of 68GiB" in line)
        order = [bar.index(glyph) for glyph in "█▓▒▚·"]
        assert order == sorted(order)
        await press(app, "down", "enter")
        assert "phi-mini" in seen(app)
        assert "4712" in seen(app)


async def test_the_overview_has_models_and_requests() -> None:
    """Where there is room: the busiest models, and of requests those first that wait longest."""
    async with dashboard(loaded(), size=(160, 48)) as app:
        lines = [line.split() for line in screen(app)]
        models = lines.index(next(line for line in lines if line[:2] == ["MODEL", "STATE"]))
        requests = lines.index(next(line for line in lines if line[:2] == ["MODEL", "PHASE"]))
        assert {line[0] for line in lines[models + 1 : models + 7]} == set(MODELS)
        assert [line[1] for line in lines[requests + 1 : requests + 7]] == [
            "preempted", "preempted", "queued", "running", "running", "running",
        ]  # fmt: skip
        assert "other model qwen-a" in " ".join(lines[requests + 1])
        assert "chat-0" in lines[requests + 1]


async def test_a_small_overview_counts_what_it_has_no_room_for() -> None:
    async with dashboard(loaded(), size=(80, 24)) as app:
        page = seen(app)
        assert "MAX TOKENS" not in page
        assert "4 more in Models" in page
        assert "more in Requests" in page


async def test_many_models_leave_room_for_requests() -> None:
    """And a few requests give theirs to models."""
    waiting = [request(f"r{n}", "m0", phase="queued") for n in range(90)]
    for rows, in_models in ((waiting, 73), (waiting[:2], 58)):
        tall = tree(requests=rows) | {"models": {f"m{n}": model(f"m{n}") for n in range(90)}}
        async with dashboard(Told(state(tall)), size=(160, 48)) as app:
            assert f"{in_models} more in Models" in seen(app)
            assert ("more in Requests" in seen(app)) == (rows is waiting)
            assert screen(app)[-3].split()[0] in ("m0", "73")


@pytest.mark.parametrize("view", [view.names[0] for view in VIEWS])
async def test_nothing_is_cut_at_80_columns(view: str) -> None:
    """The last line has whole hints; each line of the help is read to its end."""
    async with dashboard(loaded(), size=(80, 24)) as app:
        app.show_view(view)
        await settle(app)
        hints = screen(app)[-1]
        assert hints.startswith(" ? help  q quit")
        words = {text for _, text in app.view.help} | {one.name for one in app.view.actions}
        words |= {"help", "quit", "command", "filter", "sort", "detail"}
        assert {hint.split(" ", 1)[1] for hint in hints.strip().split("  ")} <= words | {
            f"{key.split(' ', 1)[1]} {text}" for key, text in app.view.help if " " in key
        }
        texts = [text for _, text in (*KEYS, *app.view.help)]
        texts += [one.help for one in app.view.actions]
        texts += [one.help for one in app.commands().values()]
        await press(app, "?")
        read = []
        for _ in range(12):
            read += [line[5:-5].strip("│ ") for line in screen(app)[1:-1]]
            await press(app, "pagedown")
        page = " ".join(" ".join(read).split())
        assert [text for text in texts if " ".join(text.split()) not in page] == []


async def test_a_request_that_has_ended_is_finished() -> None:
    """Its detail says so, and keeps what was known last."""
    async with dashboard(source := loaded(), size=(100, 30)) as app:
        await command(app, "requests")
        await press(app, "enter")
        source.say(delta({"requests": {"chat-0": None}}, NOW + 1))
        await settle(app)
        assert "finished" in seen(app)
        assert "llama-a" in seen(app)


async def test_a_gpu_without_sensors_is_an_instance() -> None:
    """What it tells is shown."""
    async with dashboard(source := loaded(), size=(120, 30)) as app:
        source.say(delta({"instances": {"0": {"gpus": [{"gpu": 0, "celsius": 61.0}]},
                                        "1": {"gpus": [{"gpu": 1}]}}}, NOW + 1))  # fmt: skip
        await settle(app)
        lines = [line for line in screen(app) if " GPU " in line]
        assert [line.split(" GPU ")[1] for line in lines] == ["0 61°C", "1"]


async def test_groups_are_named() -> None:
    """Of instances, and of models those that can have them."""
    async with dashboard(source := loaded(), size=(140, 30)) as app:
        assert "group" not in seen(app)
        models = {"llama-a": {"groups": ["pair", "single"]}}
        source.say(delta({"instances": {"1": {"group": "pair"}}, "models": models}, NOW + 1))
        await settle(app)
        assert "group pair" in seen(app)
        await command(app, "models")
        assert "0 (pair, single)" in seen(app)


async def test_an_instance_that_rests_is_shown_so() -> None:
    """It is up, and takes no requests."""
    async with dashboard(source := loaded(), size=(140, 30)) as app:
        assert "parked" not in seen(app)
        source.say(delta({"instances": {"1": {"parked": True}}}, NOW + 1))
        await settle(app)
        (line,) = [line for line in screen(app) if "parked" in line]
        assert "up phi-mini" in line


async def test_kv_on_disk_is_shown() -> None:
    async with dashboard(source := loaded(), size=(140, 30)) as app:
        assert "disk" not in seen(app)
        held = {"kv": 3 << 30, "free": 61 << 30}
        source.say(delta({"disk_bytes": held}, NOW + 1))
        await settle(app)
        assert "disk 3GiB of 64GiB KV" in seen(app)


async def test_an_overview_of_nothing() -> None:
    """A pool that never did anything, and one of which nothing is known."""
    async with dashboard(Told(state(tree()))) as app:
        assert "no tokens of the last minute" in seen(app)
    async with dashboard(Told()) as app:
        assert "NOT CONNECTED" in screen(app)[0]
        await press(app, "down", "enter", "y", "d")


async def test_more_instances_than_lines() -> None:
    """The cursor leads to the others."""
    many = {str(n): {"instance": n, "role": "mixed", "state": "up", "pid": n} for n in range(16)}
    async with dashboard(Told(state(tree(instances=many)))) as app:
        assert "more below" in seen(app)
        await press(app, *["down"] * 20)
        assert " 15 mixed" in seen(app)
        app.state.hear(state(tree()))  # of a daemon that came back with one; not shown yet
        chosen = app.view.current()
        assert chosen is not None
        assert chosen[0] == "0"
        await settle(app)
        assert " 0 mixed" in seen(app)


async def test_models_show_how_they_fare() -> None:
    """Attainment, times, marks, and where the weights are."""
    async with dashboard(loaded(), size=(160, 20)) as app:
        await command(app, "models")
        row = next(line for line in screen(app) if "llama-a" in line)
        cells = ["llama-a", "loaded", "0", "0", "1", "0", "99.7%", "420ms", "21ms", "pin"]
        assert row.split()[:10] == cells
        assert "0↓" in next(line for line in screen(app) if "gemma-a" in line)


async def test_requests_say_why_they_wait() -> None:
    """With the model that they wait for."""
    async with dashboard(loaded(), size=(120, 20)) as app:
        await command(app, "requests")
        assert "other model qwen-a" in next(line for line in screen(app) if "chat-0" in line)


async def test_a_worker_that_is_lost_is_seen() -> None:
    """In the first line, on its instance, and among the events."""
    async with dashboard(source := loaded()) as app:
        source.say(delta({"instances": {"1": {"state": "lost", "model": None}}}, NOW + 1))
        await settle(app)
        assert "1/2 up" in screen(app)[0]
        assert "1 mixed  lost idle" in seen(app)


async def test_events_newest_first() -> None:
    """Filtered like any table."""
    async with dashboard(loaded()) as app:
        await command(app, "events")
        rows = [line.split()[1] for line in screen(app)[3:7]]
        assert rows == ["request_rejected", "model_switched", "request_arrived", "instance_up"]
        await press(app, "/", *"switched", "enter", "enter")
        assert "qwen-a" in seen(app)


# --- the timeline --------------------------------------------------------------------------------


def lane(number: int) -> int:
    """The line of a lane on the screen: run, load and swap of one instance after the other."""
    return 3 + number


async def test_lanes_have_what_was_done() -> None:
    """Turns and prompts, loads, swaps; each with its model, as long as it took."""
    async with dashboard(loaded(), size=(120, 20)) as app:
        await command(app, "timeline")
        lines = screen(app)
        run, load, swap = (lines[lane(n)] for n in range(3))
        assert run.startswith("  0   run")
        assert run.count("│llama-a") == 2
        assert run.index("│llama-a") < run.index("│qwen-a")
        assert "│⇣gemma-a" in load
        assert swap.index("↑") < swap.index("↓")
        assert lines[lane(3)].startswith("  1   run")
        assert "▸│phi-mini" in lines[lane(3)]


async def test_a_turn_is_explained() -> None:
    """Its batch, its quota, and the decision that made it."""
    async with dashboard(loaded(), size=(100, 40)) as app:
        await command(app, "timeline")
        await press(app, "left", "left", "enter")
        page = seen(app)
    for words in (
        "turn of llama-a on instance 0", "7.6s, ended: quota", "quota       7.0s", "170, 45ms each",
        "appliance, asked for round", "TurnEnded", "qwen-a 400ms, llama-b", "batch (2)",
        "chat-0  preempted, 185 tokens",
    ):  # fmt: skip
        assert words in page


async def test_spans_are_walked_through() -> None:
    """Along a lane, and from lane to lane; the window follows, and stays until `f`."""
    async with dashboard(loaded()) as app:
        await command(app, "timeline")
        await press(app, "left")
        chosen = app.view.current()
        assert chosen is not None
        assert chosen[0] == "12"
        await press(app, *["left"] * 9)
        assert app.view.current()[0] == "3"  # type: ignore[index]
        await press(app, "right")
        assert app.view.current()[0] == "4"  # type: ignore[index]
        await press(app, "+", "+", "left")
        assert "paused" in screen(app)[2]
        await press(app, "down", "right")
        assert app.view.current()[0] == "11"  # type: ignore[index]
        await press(app, "f")
        assert "paused" not in screen(app)[2]
        assert app.view.current() is None
        await press(app, "up", "up", "down", "down", "down", "enter")


async def test_zoom_and_pan() -> None:
    """In steps, within bounds; panned to the right end it follows again."""
    async with dashboard(loaded()) as app:
        await command(app, "timeline")
        assert screen(app)[2].split()[0].startswith("40s")
        await press(app, "-")
        assert screen(app)[2].split()[0].startswith("1m20s")
        await press(app, *["+"] * 12)
        assert screen(app)[2].split()[0].startswith("2.0s")
        await press(app, *["-"] * 12)
        assert screen(app)[2].split()[0].startswith("30m00s")
        await press(app, "<")
        assert "paused" in screen(app)[2]
        await press(app, ">")
        assert "paused" not in screen(app)[2]


async def test_a_click_chooses_a_turn() -> None:
    """Two open it."""
    async with dashboard(loaded()) as app:
        await command(app, "timeline")
        x = screen(app)[lane(3)].index("phi-mini")
        await click(app, x, lane(3))
        assert app.view.current()[0] == "17"  # type: ignore[index]
        await click(app, x, lane(3), times=2)
        assert "turn of phi-mini" in seen(app)


# --- the memory map ------------------------------------------------------------------------------


async def test_every_slab_has_a_cell() -> None:
    """Where it lies, of a large pool each with its neighbours: weights, KV, those of both that are
    on their way, and what is free; the host below, whose KV is told by the size of its blocks."""
    async with dashboard(source := loaded(), size=(162, 30)) as app:
        source.answers["GET", "/api/instances/1/slabs"] = slabs(
            ("free", 2), ("weights:phi-mini", 3), ("kv:phi-mini*", 1), ("free", 104), slab_bytes=100
        )
        await command(app, "memory")
        await settle(app)
        lines = screen(app)
        first = next(n for n, line in enumerate(lines) if " instance 0 " in line)
        assert "64GiB, 19GiB free, by address, a cell is 1.28 slabs of 64MiB" in lines[first]
        assert "▚ gemma-a 3.06GiB" in lines[first + 1]
        assert "▞ llama-a 1.5GiB" in lines[first + 1]
        cells = "".join(line.strip() for line in lines[first + 2 : first + 7])
        glyphs = [glyph for glyph, _ in groupby(cells)]
        assert "".join(glyphs) == "█▓█·▓▞▓█▚█·▓·"
        second = next(n for n, line in enumerate(lines) if " instance 1 " in line)
        assert "a slab of 100B is 7 cells" in lines[second]
        assert lines[second + 2].strip().startswith("·" * 14 + "█" * 21 + "▞" * 7 + "·")
        assert "▓ KV in blocks of 512KiB 3.5GiB" in seen(app)
        await press(app, "enter")
        assert "moving llama-a   1.5GiB" in seen(app)


async def test_only_pools_on_the_screen_are_asked_for() -> None:
    """Of many instances as many as there is room for, and others when the cursor gets there."""
    many = {str(n): {"instance": n, "role": "mixed", "state": "up", "pid": n} for n in range(16)}
    async with dashboard(source := Told(state(tree(instances=many)))) as app:
        assert source.asked == []
        await command(app, "memory")
        asked = {path for _, path, _ in source.asked}
        assert "/api/instances/0/slabs" in asked
        assert "/api/instances/15/slabs" not in asked
        await press(app, *["down"] * 15)
        await command(app, "memory")
        assert "/api/instances/15/slabs" in {path for _, path, _ in source.asked}


async def test_every_cell_has_an_owner() -> None:
    """Where nobody tells the slabs, or not any more, cells are in the order of owners: all of a
    pool, the host below."""
    async with dashboard(source := loaded(), size=(100, 30)) as app:
        await command(app, "memory")
        assert "by address" in seen(app)
        for path in maps():
            source.answers["GET", path] = DaemonRefused("instance 0 is not up")
        await command(app, "memory")
        lines = screen(app)
        first = next(n for n, line in enumerate(lines) if " instance 0 " in line)
        assert "64GiB, 19GiB free" in lines[first]
        assert "▚ gemma-a 5GiB" in lines[first + 1]
        cells = "".join(line.strip() for line in lines[first + 2 : first + 7]).rstrip()
        assert set("█▓▚·") <= set(cells)
        assert any(" host cache " in line for line in lines)
        await press(app, "down", "down", "enter")
        assert "weights llama-a" in seen(app)


async def test_views_have_tables_to_save(tmp_path: Path) -> None:
    """Those that are no tables, too."""
    async with dashboard(loaded(), folder=tmp_path) as app:
        for name in ("overview", "memory"):
            await command(app, name)
            await press(app, "ctrl+s")
    overview = (tmp_path / "appliance-overview-20231114-221320.csv").read_text().splitlines()
    memory = (tmp_path / "appliance-memory-20231114-221320.csv").read_text().splitlines()
    assert overview[0] == "instance,role,state,model,weights,KV,prefetched,graphs,free"
    assert overview[1].startswith("0,mixed,up,qwen-a,24696061952,")
    assert f"instance 0,loading,gemma-a,{49 << 26}" in memory
