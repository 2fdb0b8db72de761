"""How long answers become that had not ended: the Kaplan-Meier estimate of their lengths.

An answer under way says that it is longer than what there is of it. To leave such answers out, or
to take them as they are, makes answers too short: long ones are those that had not ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class OutputLengths:
    """The lengths of some answers, of which some had not ended."""

    def __init__(self, ended: Iterable[int], unended: Iterable[int]) -> None:
        """Tokens of each. The longest one of all counts as ended, as nothing is known beyond it.
        O(n log n)."""
        whole, open_ = Counter(ended), Counter(unended)
        self._shares: list[tuple[int, float]] = []
        """Lengths, the longest first, and the share of answers that have this length."""
        at_risk = whole.total() + open_.total()
        surviving = 1.0
        longest = max([*whole, *open_], default=0)
        for tokens in sorted({*whole, *open_}):
            share = surviving * whole[tokens] / at_risk
            if tokens == longest:
                share = surviving
            self._shares.append((tokens, share))
            surviving -= share
            at_risk -= whole[tokens] + open_[tokens]
        self._shares.reverse()

    def expected(self, tokens: int) -> int:
        """The mean length of answers that are longer than these tokens; these, if no answer was.
        O(different lengths)."""
        longer = [(length, share) for length, share in self._shares if length > tokens]
        total = sum([share for _, share in longer])
        if total <= 0:
            return tokens
        return max(tokens + 1, round(sum([n * share for n, share in longer]) / total))
