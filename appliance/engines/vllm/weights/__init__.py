"""Weights of vLLM's models: from a checkpoint's files to parameters in our memory."""
