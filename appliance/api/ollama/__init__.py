"""Ollama's endpoints that list, show, fetch and delete models."""
