"""Text that streams: every delta is final, and nothing passes a stop string."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from appliance.tokens import TextStream, Tokenizer

from .fake_service import small_tokenizer

tokens = st.lists(st.integers(0, 299), max_size=80)
ascii_tokens = st.text("abc", max_size=30).map(small_tokenizer().encode)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def stream(ids: list[int] | tuple[int, ...], *stops: str, min_tokens: int = 0) -> list[str]:
    text = TextStream(small_tokenizer(), stops, min_tokens=min_tokens)
    return [*(text.push(token) for token in ids), text.finish()]


def cut_by_character(text: str, stops: list[str]) -> str:
    """The definition: read character by character, stop when a stop string is complete."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(tokens)
def test_deltas_join_to_the_whole_text(ids: list[int]) -> None:
    """Any tokens, also ones that are no UTF-8: the deltas are the text decoded at once."""
    assert small_tokenizer().decode(ids) == "".join(stream(ids))


@given(ascii_tokens, stop_lists)
def test_text_ends_before_the_first_stop_string(ids: tuple[int, ...], stops: list[str]) -> None:
    """However the text is split into tokens, it is cut as if read character by character."""
    text = "".join(stream(ids, *stops))

    assert cut_by_character(small_tokenizer().decode(ids), stops) == text
    assert not any(stop in text for stop in stops)


@given(ascii_tokens, stop_lists)
def test_the_stop_string_that_came_is_told(ids: tuple[int, ...], stops: list[str]) -> None:
    """It is the one that follows what was given out; there is none as long as none came."""
    text = TextStream(small_tokenizer(), stops)
    shown = "".join([*(text.push(token) for token in ids), text.finish()])
    whole = small_tokenizer().decode(ids)

    assert text.stopped == (text.stop in stops) == (shown != whole)
    assert whole.startswith(shown + (text.stop or ""))


@given(tokens, st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3))
def test_no_stop_string_ever_gets_out(ids: list[int], stops: list[str]) -> None:
    """Any tokens, any stop strings: what is given out holds none of them."""
    text = "".join(stream(ids, *stops))

    assert cut_by_character(small_tokenizer().decode(ids), stops) == text


def test_half_a_character_is_held_until_it_is_whole() -> None:
    """Bytes of one character that come one by one make one delta."""
    ids = small_tokenizer().encode("🙂")

    assert len(ids) == 4
    assert stream(ids) == ["", "", "", "🙂", ""]
    assert "".join(stream(ids[:3])) == "�"


def test_garbage_is_given_out_while_it_comes() -> None:
    """An endless run of bytes that are no text is not held back to the end."""
    (continuation,) = (i for i in range(300) if small_tokenizer().piece(i)[1] == b"\x80")
    deltas = stream([continuation] * 600)

    assert "".join(deltas) == "�" * 600
    assert len(deltas[-1]) < 10


def test_a_stop_string_across_tokens_is_held_then_dropped() -> None:
    """The beginning of a stop string is not given out before it is known not to be one."""
    ids = [small_tokenizer().encode(character)[0] for character in "xEND"]
    text = TextStream(small_tokenizer(), ["END"])

    assert [text.push(token) for token in ids] == ["x", "", "", ""]
    assert text.stopped
    assert text.push(ids[0]) == "" == text.finish()


def test_a_beginning_that_came_to_nothing_is_given_out() -> None:
    """Held text comes out with what follows it, and at the end."""
    ids = [small_tokenizer().encode(character)[0] for character in "xENxEN"]

    assert stream(ids, "END") == ["x", "", "", "ENx", "", "", "EN"]


def test_the_stop_string_completed_first_wins() -> None:
    """A short stop string inside a longer one that is not complete yet ends the text."""
    ids = small_tokenizer().encode("xabcd")

    assert "".join(stream(ids, "abcd", "bc")) == "xa"
    assert "".join(stream(ids, "bc", "abc")) == "x"


def test_min_tokens_must_pass_before_a_stop_string_counts() -> None:
    """Stop strings that end within the first tokens are text; later ones stop."""
    ids = [small_tokenizer().encode(character)[0] for character in "a.a.b."]

    assert "".join(stream(ids, ".")) == "a"
    assert "".join(stream(ids, ".", min_tokens=2)) == "a.a"
    assert "".join(stream(ids, ".", min_tokens=6)) == "a.a.b."
    assert "".join(stream(ids, "a.", min_tokens=3)) == "a."


def test_special_tokens_are_no_text() -> None:
    """The end-of-text token leaves no trace in the text."""
    hello = small_tokenizer().encode("hello")

    assert "".join(stream([0, *hello, 0, 0, *hello])) == "hellohello"


def test_a_first_word_keeps_its_space_behind_a_prompt() -> None:
    """Decoders that drop the space at the start of a text do so with the prompt's, not ours."""
    encoder = tokenizers.Tokenizer(models.WordLevel({"▁my": 0, "▁name": 1, "▁is": 2}, "▁my"))
    encoder.pre_tokenizer = pre_tokenizers.Metaspace()
    encoder.decoder = decoders.Metaspace()
    text = TextStream(Tokenizer(encoder), prompt=(0, 1))

    assert text.push(2) == " is"
    assert [text.push(1) for _ in range(40)] == [" name"] * 40


def test_a_prompt_that_ends_in_half_a_character_is_no_context() -> None:
    """Bytes that would complete it are decoded for themselves, as they were generated."""
    ids = small_tokenizer().encode("🙂")
    text = TextStream(small_tokenizer(), prompt=ids[:2])

    assert "".join([*(text.push(token) for token in ids[2:]), text.finish()]) == "��"
