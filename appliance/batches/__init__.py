"""Batches of requests and the files they are in: what is on disk, and what follows from it."""
