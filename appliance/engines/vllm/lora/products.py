"""What a step multiplies with adapters: tokens by adapter, and the products of each layer.

vLLM's own code for CPUs copies the adapter of every token before it multiplies, and computes a
token without one with the last adapter when another token of the step has one. Here the tokens of
an adapter are put together. Adapters of about equally many tokens are one batched product with the
stacked tensors as they lie; one with many more has products of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

MOST_PADDED: Final = 4
"""How many times its tokens a batched product may have rows."""
MOST_ROWS: Final = 2048
"""Of a batched product: as many copies of inputs and outputs of a layer take memory at once."""
LEAST_BATCHED: Final = 4
"""Adapters that are worth a batched product."""

BASE: Final = -1
"""Of a token without an adapter."""


class _Batched(NamedTuple):
    """Tokens of adapters that are computed together, in rows of equal length, one for each slot."""

    tokens: torch.Tensor
    """[slots * width]; rows are filled up with the first token."""
    width: int
    places: torch.Tensor
    """[tokens]: where each one's result is among them."""
    others: torch.Tensor | None
    """[tokens, 1]: those that are not in a row, if any."""


class _Alone(NamedTuple):
    """Tokens of one adapter; None: all of the step."""

    slot: int
    tokens: torch.Tensor | None


class AdapterProducts:
    """Replaces the Punica wrapper of vLLM's layers."""

    def __init__(self, slots: int) -> None:
        """Adapters are numbered from 0 to before `slots`."""
        self._slots = slots
        self._batched: _Batched | None = None
        self._alone: list[_Alone] = []

    def begin(self, slots: Sequence[int]) -> None:
        """The next step has these tokens: the number of each one's adapter, or `BASE`."""
        self._batched, self._alone = None, []
        of_tokens = np.asarray(slots, dtype=np.int64)
        present, counts = np.unique(of_tokens[of_tokens != BASE], return_counts=True)
        if len(present) == 1 and counts[0] == len(of_tokens):
            self._alone.append(_Alone(int(present[0]), None))
            return
        batched = present[counts <= self._width(counts)]
        for slot in np.setdiff1d(present, batched):
            tokens = torch.from_numpy(np.flatnonzero(of_tokens == slot))
            self._alone.append(_Alone(int(slot), tokens))
        if len(batched):
            self._batched = self._rows(of_tokens, batched)

    def _width(self, counts: np.ndarray[Any, Any]) -> int:
        """Of the rows of a batched product; 0 if there is to be none."""
        for width in sorted(set(counts.tolist()), reverse=True):
            few = counts[counts <= width]
            if len(few) < LEAST_BATCHED:
                return 0
            if self._slots * width <= min(MOST_ROWS, MOST_PADDED * int(few.sum())):
                return int(width)
        return 0

    def _rows(self, of_tokens: np.ndarray[Any, Any], batched: np.ndarray[Any, Any]) -> _Batched:
        inside = np.isin(of_tokens, batched)
        targets = np.flatnonzero(inside)
        targets = targets[np.argsort(of_tokens[targets], kind="stable")]
        rows = of_tokens[targets]
        columns = np.arange(len(rows)) - np.searchsorted(rows, rows)
        width = int(columns.max()) + 1
        tokens = np.zeros(self._slots * width, dtype=np.int64)
        tokens[rows * width + columns] = targets
        places = np.zeros(len(of_tokens), dtype=np.int64)
        places[targets] = rows * width + columns
        others = None if inside.all() else torch.from_numpy(~inside).unsqueeze(1)
        return _Batched(torch.from_numpy(tokens), width, torch.from_numpy(places), others)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Sequence[torch.Tensor],
        lora_b_stacked: Sequence[torch.Tensor],
        scale: float,
        output_slices: Sequence[int],
        **_: object,
    ) -> None:
        """Add to the layer's output `y` [tokens, out] what adapters make of `x` [tokens, in].

        The stacked tensors are, for each slice of the output, A [slots, 1, rank, in] and
        B [slots, 1, out, rank]; of a slice that no adapter changes they are empty. B has been
        scaled, so `scale` is 1, as vLLM's is.
        """
        batched = self._batched
        if batched is not None:
            rows = x.index_select(0, batched.tokens).view(self._slots, batched.width, -1)
        parts = [(one, x if one.tokens is None else x[one.tokens]) for one in self._alone]
        start = 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            target = y[:, start : start + size]
            start += size
            if not a.numel():
                continue
            for one, part in parts:
                added = (part @ a[one.slot, 0].t()) @ b[one.slot, 0].t()
                if one.tokens is None:
                    target += added
                else:
                    target[one.tokens] += added
            if batched is not None:
                low = torch.bmm(rows, a[:, 0].transpose(1, 2))
                every = torch.bmm(low, b[:, 0].transpose(1, 2)).view(-1, size)
                added = every.index_select(0, batched.places)
                if batched.others is not None:
                    added.masked_fill_(batched.others, 0)
                target += added
