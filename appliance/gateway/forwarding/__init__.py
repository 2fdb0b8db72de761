"""Requests for models of other servers: passed on, and what they come to."""
