"""Layers of vLLM that compute otherwise here."""
