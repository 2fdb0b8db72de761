"""The OpenAPI document, and what OPTIONS answers."""
