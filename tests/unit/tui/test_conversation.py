"""What a chat knows of its answers: their text, their times, where they were computed."""

from __future__ import annotations

import pytest

from tests.unit.tui.bench import NOW, delta, model, notice, request, said, state, tree
from tui import conversation as conversations
from tui.conversation import LONGEST_QUESTION, MOST_LINES, AnswerState, ChatAnswer, Conversation
from tui.drawing.wrapping import Wrapped
from tui.messages import AnswerPiece, DaemonRefused, Document, Message, PieceKind
from tui.request_trace import RequestTrace, TraceSwitch
from tui.state import State

TIMING = (
    'queue;dur=1500.0, load;dur=250.5, prefill;dur=0.0, decode;dur=40.0, preempted;dur=9.0;desc="2"'
)


def heard(*messages: Message) -> State:
    found = State()
    for message in messages:
        found.hear(message)
    return found


def answered(*pieces: tuple[float, PieceKind, Document]) -> ChatAnswer:
    answer = ChatAnswer("why?", RequestTrace(State()))
    for piece in pieces:
        answer.hear(AnswerPiece(*piece))
    return answer


def finish(reason: str) -> Document:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


def test_an_answer_measures_as_its_listener_sees() -> None:
    """From the question to the first of the text, then between tokens; the rest says the daemon."""
    answer = answered(
        (10.0, PieceKind.ASKED, {}),
        (10.5, PieceKind.BEGUN, {"request": "chatcmpl-7"}),
        (
            12.0,
            PieceKind.DATA,
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        ),
        (12.0, PieceKind.DATA, said("", reasoning="hm")),
        (13.0, PieceKind.DATA, said("It ")),
        (14.0, PieceKind.DATA, said("is.")),
        (16.0, PieceKind.DATA, finish("length")),
        (16.5, PieceKind.REMARK, {"text": f"server-timing: {TIMING}"}),
        (
            16.5,
            PieceKind.DATA,
            {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}},
        ),
    )
    answer.end(AnswerState.DONE)

    assert (answer.text, answer.reasoning, answer.why) == ("It is.", "hm", "length")
    assert answer.measured() == {
        "request": "chatcmpl-7", "outcome": "done", "ttft_seconds": 2.0, "tbt_seconds": 1.0,
        "prompt_tokens": 7, "tokens": 5, "queue_seconds": 1.5, "load_seconds": 0.2505,
        "prefill_seconds": 0.0, "decode_seconds": 0.04, "preempted_seconds": 0.009,
        "preemptions": 2, "instances": [], "switches": [],
    }  # fmt: skip


def test_an_error_in_a_stream_ends_it() -> None:
    """In the daemon's words; what came stays, and later words change nothing."""
    answer = answered(
        (1.0, PieceKind.ASKED, {}),
        (2.0, PieceKind.DATA, said("It")),
        (3.0, PieceKind.DATA, {"error": {"message": "the worker died", "type": "server_error"}}),
    )
    answer.end(AnswerState.DONE)

    assert (answer.outcome, answer.why, answer.text) == (
        AnswerState.FAILED,
        "the worker died",
        "It",
    )
    assert answer.ttft_seconds == 1.0
    assert answer.tbt_seconds is None


@pytest.mark.parametrize(
    "data", [{"choices": [{"text": "x"}]}, {"choices": "x"}, {"usage": {"tokens": 1}}]
)
def test_what_no_appliance_says_is_refused(data: Document) -> None:
    """Some other server answers there."""
    with pytest.raises(DaemonRefused, match="no answer of an appliance"):
        answered((1.0, PieceKind.DATA, data))


def test_remarks_that_mean_nothing_are_passed_over() -> None:
    """A stream is kept alive by them."""
    answer = answered(
        (1.0, PieceKind.REMARK, {"text": "keep-alive"}),
        (1.0, PieceKind.REMARK, {"text": "server-timing: queue;dur=x, load"}),
    )

    assert (answer.phases, answer.preemptions) == ({}, 0)


def test_a_conversation_sends_what_was_said() -> None:
    """Not what was never answered."""
    talk = Conversation("a")
    for question, text in (("one?", "1"), ("lost?", ""), ("two?", "2")):
        answer, _ = talk.ask(question, RequestTrace(State()))
        assert talk.coming is answer
        answer.text = text
        answer.end(AnswerState.DONE if text else AnswerState.FAILED)
        assert talk.coming is None
    _, body = talk.ask("three?", RequestTrace(State()))

    assert body["messages"] == [
        {"role": "user", "content": "one?"}, {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"},
        {"role": "user", "content": "three?"},
    ]  # fmt: skip
    assert (body["model"], body["stream"]) == ("a", True)
    assert body["stream_options"] == {"include_usage": True}


def test_only_so_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an answer its beginning, of a conversation its end."""
    monkeypatch.setattr(conversations, "MOST_CHARACTERS", 19)
    talk = Conversation("a")
    for number in range(4):
        answer, body = talk.ask(f"{number}?", RequestTrace(State()))
        talk.hear(answer, AnswerPiece(1.0, PieceKind.DATA, said("x" * 7)))
        answer.end(AnswerState.DONE)
    assert [one.question for one in talk.answers] == ["2?", "3?"]
    assert [message["content"] for message in body["messages"]] == ["2?", "x" * 7, "3?"]

    talk.hear(answer, AnswerPiece(1.0, PieceKind.DATA, said("y" * 3, reasoning="z")))
    assert list(talk.answers) == [answer]
    assert not answer.cut
    for _ in range(2):
        talk.hear(answer, AnswerPiece(1.0, PieceKind.DATA, said("y" * 30, reasoning="z")))
    assert len(answer.question) + len(answer.text) + len(answer.reasoning) == 19
    assert answer.cut


def test_only_so_many_lines_are_kept() -> None:
    """However they end: some models say nothing else."""
    answer = answered(
        (1.0, PieceKind.DATA, said("\n\u2028" * (MOST_LINES // 2 - 1))),
        (2.0, PieceKind.DATA, said("a\nb\nc\nd\n")),
        (3.0, PieceKind.DATA, said("e")),
    )
    assert answer.text[-4:] == "\u2028a\nb"
    assert answer.cut


def test_a_question_is_not_too_long() -> None:
    """It is refused, and nothing is forgotten for it."""
    talk = Conversation("a")
    talk.ask("q" * LONGEST_QUESTION, RequestTrace(State()))
    with pytest.raises(ValueError, match="has 100,001 characters; 100,000 are the most"):
        talk.ask("q" * (LONGEST_QUESTION + 1), RequestTrace(State()))
    assert len(talk.answers) == 1


# --- the way of a request ------------------------------------------------------------------------


def span(number: int, instance: int, **members: object) -> Document:
    row = {"number": number, "instance": instance, "kind": "turn", "model": "a"}
    return {str(number): row | {"began_unix_seconds": NOW} | members}


def test_switches_are_those_of_its_instances_while_it_lived() -> None:
    """Neither those before, nor those elsewhere, nor those behind its end."""
    known = heard(
        state(tree(spans=span(3, 1, requests=["old"]))),
        notice(1, "model_switched", instance=0, model="a"),
    )
    trace = RequestTrace(known)
    trace.hear(known)
    for message in (
        notice(2, "model_switched", instance=0, model="b"),
        notice(3, "request_arrived", id="mine", model="a"),
        notice(4, "model_switched", instance=0, model="c"),
        notice(5, "model_switched", instance=1, model="c"),
        delta({"spans": span(4, 0, requests=["mine", "old"])}),
        notice(6, "model_switched", instance=0, model="a"),
    ):
        known.hear(message)
    assert trace.switches == []  # nobody has said what its name is
    trace.request = "mine"
    trace.hear(known)
    assert trace.instances == ["0"]
    assert trace.switches == [TraceSwitch("0", "c"), TraceSwitch("0", "a")]
    for message in (
        delta({"spans": span(5, 2, prompts=["mine"])}),
        notice(7, "request_ended", id="mine", model="a", output_tokens=12),
        notice(8, "model_switched", instance=0, model="b"),
    ):
        known.hear(message)
    trace.hear(known)

    assert (trace.over, trace.output_tokens, trace.missed) == (True, 12, False)
    assert trace.instances == ["0", "2"]
    assert len(trace.switches) == 2


def test_where_it_was_is_received_behind_its_end() -> None:
    """Events come at once, spans with the next change."""
    known = heard(state(tree()))
    trace = RequestTrace(known)
    trace.request = "mine"
    known.hear(notice(1, "request_arrived", id="mine"))
    known.hear(notice(2, "request_ended", id="mine", output_tokens=1))
    trace.hear(known)
    assert (trace.over, trace.instances) == (True, [])
    known.hear(delta({"spans": span(9, 1, prompts=["mine"])}))
    trace.hear(known)
    assert trace.instances == ["1"]


def test_where_it_was_is_received_of_a_daemon_that_began_anew() -> None:
    """Its numbers are small again."""
    known = heard(
        state(tree(spans=span(500, 1, ended_unix_seconds=NOW))),
        state(tree(spans=span(1, 1)) | {"started_unix_seconds": NOW}, missed=True),
    )
    trace = RequestTrace(known)
    trace.request = "mine"
    known.hear(delta({"spans": span(2, 0, requests=["mine"])}))
    trace.hear(known)
    assert trace.instances == ["0"]


def test_the_instance_of_a_live_request_is_known() -> None:
    """Before it has had a turn; one that is not placed is nowhere."""
    known = heard(state(tree(requests=[request("mine", "a", instance=None)])))
    trace = RequestTrace(known)
    trace.request = "mine"
    trace.hear(known)
    assert trace.instances == []
    known.hear(delta({"requests": {"mine": {"instance": 1}}}))
    trace.hear(known)
    assert trace.instances == ["1"]


def test_what_was_missed_is_reported() -> None:
    """With a daemon that was lost the end of a request may be, too."""
    known = heard(state(tree(requests=[request("mine", "a")])))
    trace = RequestTrace(known)
    trace.request = "mine"
    known.hear(state(tree(requests=[request("mine", "a")]), missed=True))
    trace.hear(known)
    assert (trace.missed, trace.over) == (True, False)
    known.hear(state(tree(models="a"), missed=True))
    known.hear(delta({"models": {"d": model("d")}}))
    trace.hear(known)
    assert trace.over


def test_more_events_than_are_kept_are_missed() -> None:
    """Nobody looked for a while."""
    known = heard(state(tree()))
    trace = RequestTrace(known)
    trace.request = "mine"
    known.hear(notice(1, "request_arrived", id="mine"))
    trace.hear(known)
    for number in range(2, 2 + (known.notices.maxlen or 0)):
        known.hear(notice(number, "model_load_requested", model="a"))
    assert not trace.missed
    trace.hear(known)
    assert trace.missed


# --- its text ------------------------------------------------------------------------------------

TEXT = "Hello wörld, this\n\n  is indented and averyveryverylongword here 漢字漢字漢字漢字   end"


def test_text_is_cut_between_words() -> None:
    """Within one that is longer than a line; by cells, as some characters take two."""
    text = Wrapped(10)
    text.add(TEXT)

    assert [line.rstrip() for line in text.lines] == [
        "Hello", "wörld,", "this", "", "  is", "indented", "and", "averyveryv", "erylongwor",
        "d here", "漢字漢字漢", "字漢字", "end",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [7, 10, 33, 200])
def test_text_that_grows_is_cut_alike(width: int) -> None:
    """However it comes."""
    whole, grown = Wrapped(width), Wrapped(width)
    whole.add(TEXT)
    for character in TEXT:
        grown.add(character)

    assert grown.lines == whole.lines


def test_some_lines_of_a_text() -> None:
    """Those that there are, also of a text that is nothing."""
    for added in (TEXT, "", "one", "one\n"):
        text = Wrapped(10)
        text.add(added)
        lines = text.lines
        assert len(text) == len(lines)
        for begin in range(-2, len(lines) + 2):
            for end in range(-2, len(lines) + 2):
                assert text.cut(begin, end) == lines[max(0, begin) : max(0, end)]


def test_no_text_moves_a_cursor() -> None:
    """Control characters are seen, and do nothing; lines end where Unicode has them end."""
    text = Wrapped(80)
    text.add("a\x1b[2J\x07\x9b\u202eb\r\nc\td\u2028e\x7f")

    assert text.lines == ["a␛[2J␇\ufffd\ufffdb", "c    d", "e␡"]
