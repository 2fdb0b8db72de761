"""Batches and files, in the dialects of OpenAI and Anthropic."""
