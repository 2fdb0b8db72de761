"""Processes that are forked from one that has imported vLLM: both sides of that."""
