"""An answer of a chat in lines, which are made where they are seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tui.conversation import ChatAnswer
from tui.drawing.canvas import Line
from tui.drawing.theme import ColourTheme
from tui.drawing.wrapping import Wrapped
from tui.view import ViewContext
from tui.views.answer_stats import stats_lines

_MARK, _PAD = "> ", "  "


class AnswerLayout:
    """For one width and one theme, as far as the answer has come: the question, what was answered,
    and the stats. `len` is the number of lines."""

    def __init__(self, answer: ChatAnswer, width: int, theme: ColourTheme) -> None:
        self.width = width
        self.theme = theme
        self._answer = answer
        self._room = max(1, width - len(_PAD))
        self._question, self._reasoning, self._text = (Wrapped(self._room) for _ in range(3))
        self._question.add(answer.question)
        self._reasoning_there = self._text_there = 0
        self._behind: list[Line] = []
        self._was_newest = True

    def catch_up(self, context: ViewContext, *, newest: bool) -> None:
        """O(what is new). The stats of an answer change only while it is the newest."""
        answer = self._answer
        self._reasoning.add(answer.reasoning[self._reasoning_there :])
        self._text.add(answer.text[self._text_there :])
        self._reasoning_there, self._text_there = len(answer.reasoning), len(answer.text)
        if newest or self._was_newest:
            self._was_newest = newest
            cut: Line = [(f"{_PAD}the rest of it is not kept", self.theme.warn)]
            stats = [[(_PAD, ""), *line] for line in stats_lines(answer, context, self._room)]
            self._behind = [*([cut] if answer.cut else []), *stats, []]

    def __len__(self) -> int:
        return sum(len(text) for text in self._texts()) + len(self._behind)

    def lines(self, begin: int, end: int) -> list[Line]:
        """From the one to before the other. O(those)."""
        lines: list[Line] = []
        for text in self._texts():
            pad = style = ""
            if text is self._question:
                pad = style = self.theme.accent
            elif text is self._reasoning:
                style = f"italic {self.theme.dim}"
            lines += [[(_PAD, pad), (line, style)] for line in text.cut(begin, end)]
            if text is self._question and begin <= 0 < end:
                lines[0][0] = (_MARK, pad)
            begin, end = begin - len(text), end - len(text)
        return lines + self._behind[max(0, begin) : max(0, end)]

    def _texts(self) -> Iterator[Wrapped]:
        yield self._question
        if self._reasoning_there:
            yield self._reasoning
        if self._text_there:
            yield self._text


def lines_of(answers: Sequence[AnswerLayout], begin: int, end: int) -> list[Line]:
    """Some of those of answers that stand one below the other."""
    lines: list[Line] = []
    for one in answers:
        lines += one.lines(begin, end)
        begin, end = begin - len(one), end - len(one)
    return lines
