"""Ranks of one instance, each on a GPU of its own; on the pretend driver so far."""
