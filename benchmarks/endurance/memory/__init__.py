"""Weights and KV of some models on two small pools, in this process, under a random schedule."""
