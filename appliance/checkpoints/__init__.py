"""Checkpoints on disk: what they hold, what they are for, how they come and go."""
