"""Requests for models of other servers: what these are sent, and what their clients get."""
