"""Checkpoints that boxes give each other: what a box offers, and how another one fetches it."""
