"""Pieces of text on their way out, read for reasoning and tool calls."""

from __future__ import annotations

from appliance.api.plan import Plan
from appliance.api.replies import Piece


class ToolReader:
    """Reads the pieces of all choices of one answer, in their order."""

    def __init__(self, plan: Plan) -> None:
        """For a plan with an interpretation."""
        assert plan.interpretation is not None
        self._interpretation = plan.interpretation
        self._plan = plan
        self._whole: dict[int, tuple[list[str], list[int]]] = {}
        """Texts and tokens so far of answers that are not streamed, by choice."""
        self._called: set[int] = set()
        """Choices that have called tools."""
        self.reasoning_tokens = 0
        """Of all choices that ended."""

    async def read(self, piece: Piece) -> Piece:
        """The piece, with what of its text is reasoning and what are calls. Raises
        `GenerationFailed`.

        An answer that is not streamed is read at its end; until then its pieces hold no text.
        """
        text, tokens = piece.text, piece.ids or []
        if not self._plan.return_token_ids:
            piece.ids = None
        if not self._plan.stream:
            texts, together = self._whole.setdefault(piece.index, ([], []))
            texts.append(text)
            together += tokens
            piece.text = ""
            if piece.finish is None:
                return piece
            text, tokens = "".join(texts), together
        elif not (text or tokens or piece.finish):
            return piece
        heard = await self._interpretation.hear(piece.index, text, tokens, piece.finish is not None)
        piece.text, piece.calls, piece.reasoning = heard.content, heard.calls, heard.reasoning
        self.reasoning_tokens += heard.reasoning_tokens
        if heard.calls:
            self._called.add(piece.index)
        # OpenAI's, and vLLM's: "tool_calls" if the model chose what to call, "stop" if it had to.
        if piece.finish == "stop" and piece.index in self._called and not self._plan.named_tool:
            piece.finish = "tool_calls"
        return piece
