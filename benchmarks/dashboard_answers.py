"""What a big box answers to views of the dashboard: batches, policies, config, keys, usage."""

from __future__ import annotations

from tui.messages import Document

BATCHES, POLICIES, KEYS, CHANGED = 100, 8, 60, 12
"""Rows; the last are settings that the files have otherwise."""
DECISIONS = ("place", "prefill", "round", "evict", "prefetch")


def answers(now: float, models: list[str]) -> dict[str, Document]:
    """By path."""
    return {
        "/v1/batches?limit=100": {
            "object": "list", "data": [_batch(n, int(now)) for n in range(BATCHES)],
            "has_more": True,
        },
        "/api/policies": _policies(now),
        "/api/config": {
            "files": ["/etc/appliance.toml"],
            "config": {
                "api": {"bind": "127.0.0.1:11500", "max_queue": 1024},
                "model": [{"name": name, "path": f"/models/{name}"} for name in models],
            },
        },
        "/api/config/check": {
            "ok": True, "problems": [],
            "changes": [
                {"key": f"model.{name}", "old": None, "new": f"/models/{name}",
                 "applies": "reload"}
                for name in models[:CHANGED]
            ],
        },
        "/api/keys": {"keys": [_key(n, now) for n in range(KEYS)]},
        "/api/usage?by=key,model&since=30d": {
            "rows": [_usage(n, name) for n in range(KEYS) for name in models[:CHANGED]],
            "budgets": [],
        },
    }  # fmt: skip


def _usage(number: int, model: str) -> Document:
    return {
        "key": f"key-{number}", "model": model, "requests": number, "input_tokens": 900 * number,
        "cached_tokens": 70 * number, "output_tokens": 210 * number, "gpu_seconds": 6.5 * number,
        "waiting_seconds": 0.5 * number,
    }  # fmt: skip


def _batch(number: int, now: int) -> Document:
    return {
        "id": f"batch_{number}", "object": "batch", "endpoint": "/v1/completions",
        "status": "in_progress" if number % 3 else "completed", "input_file_id": "file-7",
        "created_at": now - 60 * number, "expires_at": now + 24 * 3600,
        "in_progress_at": now - 50 * number,
        "request_counts": {"total": 1000, "completed": 9 * number, "failed": number % 7},
        "usage": {"input_tokens": 81 * number, "output_tokens": 180 * number},
    }  # fmt: skip


def _policies(now: float) -> Document:
    names = [f"policy-{n}" for n in range(POLICIES)]
    time = {"calls": 4711, "faults": 0, "seconds": 0.2, "p50_seconds": 3e-5, "p99_seconds": 2e-4,
            "max_seconds": 1e-3}  # fmt: skip
    active = {"use": names, "decisions": {}, "parameters": {names[0]: {"q_max_seconds": 3.0}}}
    return {
        "installed": [
            {"name": name, "about": f"What {name} does.", "distribution": "appliance",
             "version": "1.2.3", "shipped": True, "hooks": list(DECISIONS), "error": ""}
            for name in names
        ],
        "active": active,
        "decisions": dict.fromkeys(DECISIONS, names),
        "policies": [
            {"name": name, "calls": 4711, "faults": 0, "faults_in_a_row": 0, "disabled": False,
             "apart": False, "busy": False, "decisions": dict.fromkeys(DECISIONS, time)}
            for name in names
        ],
        "previous": [active],
        "events": [
            {"what": "fault", "unix_seconds": now - 9, "policy": names[0], "hook": "evict",
             "reason": "took longer than 50 ms", "count": 3}
        ],
    }  # fmt: skip


def _key(number: int, now: float) -> Document:
    return {
        "name": f"key-{number}", "created_unix_seconds": now - 3600 * number,
        "expires_unix_seconds": now + 3600 * (number - 9), "expired": number < 9,
        "scopes": ["infer"], "models": [], "classes": ["interactive", "batch"], "slo": False,
        "requests_per_minute": 600, "tokens_per_minute": None, "concurrency": 8,
        "use": {"live": 2, "requests": 1234, "prompt_tokens": 98_765, "output_tokens": 54_321,
                "refusals": 7},
    }  # fmt: skip
