"""Weights and KV of six models on two small pools, in this process, under a random schedule."""
