"""Ollama's dialect: its requests become vLLM's, and vLLM's answers become Ollama's lines."""
