"""Advice on policies: the end of a box's own journal, replayed under others than decided then."""
