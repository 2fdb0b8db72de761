"""How much time a guide may take of the thread that computes for everybody.

A grammar can be so ambiguous that each token takes longer than the one before: masks and accepted
tokens of one request then hold up the steps of all others. A guide therefore has a budget of CPU
time, a part at once and a part for each token. When it is used up, the request ends.
"""

from __future__ import annotations

import time
from typing import Final

import torch
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

AT_ONCE_SECONDS: Final = 0.5
"""The first masks of a large schema take a tenth of that."""
TOKEN_SECONDS: Final = 0.005
"""On top for each token; usual are 0.1 ms with a vocabulary of 150 thousand."""


class GuideBudget(StructuredOutputGrammar):  # type: ignore[misc]
    """A grammar that accepts no more tokens once its time is used up. O(1) on top of it."""

    def __init__(self, grammar: StructuredOutputGrammar) -> None:
        self.grammar: Final = grammar
        self._left_seconds = AT_ONCE_SECONDS

    @property
    def used_up(self) -> bool:
        """Whether it took too long."""
        return self._left_seconds < 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        began = time.thread_time()
        accepted: bool = self.grammar.accept_tokens(request_id, tokens)
        self._left_seconds += TOKEN_SECONDS * len(tokens)
        self._spend(began)
        return accepted and not self.used_up

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        began = time.thread_time()
        self.grammar.fill_bitmask(bitmask, batch_index)
        self._spend(began)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        valid: list[int] = self.grammar.validate_tokens(tokens)
        return valid

    def rollback(self, num_tokens: int) -> None:
        self.grammar.rollback(num_tokens)

    def is_terminated(self) -> bool:
        terminated: bool = self.grammar.is_terminated()
        return terminated

    def reset(self) -> None:
        self.grammar.reset()

    def _spend(self, began: float) -> None:
        """Take the time since `began`; what is saved does not add up beyond what is there at
        once."""
        left = self._left_seconds - (time.thread_time() - began)
        self._left_seconds = min(left, AT_ONCE_SECONDS)
