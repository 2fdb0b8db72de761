"""Metrics, traces, the request log, and the latency breakdown of requests."""
