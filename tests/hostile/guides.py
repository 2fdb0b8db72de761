"""Guides that are made to end, or to hold up, what compiles or follows them."""

from __future__ import annotations


def chain_of_rules(rules: int) -> str:
    """A grammar in which each rule is the next one. The literal has it parsed by llguidance, which
    recurses as often."""
    lines = ["start: r0", *(f"r{number}: r{number + 1}" for number in range(rules))]
    return "\n".join([*lines, f'r{rules}: "::="', ""])


AMBIGUOUS = 'root ::= a\na ::= a a | a a a | "x" | ""\n'
"""Every token can be derived in more and more ways: the next mask takes longer with each."""
