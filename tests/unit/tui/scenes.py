"""An appliance at a moment, as a dashboard hears of it: six models, two instances, some load."""

from __future__ import annotations

from tests.unit.tui.bench import NOW, Told, delta, model, notice, request, state
from tui.messages import Document

GIB = 1 << 30
MODELS = ("llama-a", "llama-b", "qwen-a", "qwen-b", "gemma-a", "phi-mini")


def span(
    number: int, kind: str, of: str, began: float, ended: float | None, **more: object
) -> Document:
    row: Document = {
        "number": number, "instance": 0, "kind": kind, "model": of,
        "began_unix_seconds": NOW + began,
    }  # fmt: skip
    if ended is not None:
        row |= {"ended_unix_seconds": NOW + ended, "outcome": "done"}
    return row | more


DECISION = {
    "after": "TurnEnded", "hook": "round", "policy": "appliance",
    "plan": [["qwen-a", 0.4], ["llama-b", None]],
}  # fmt: skip


def spans() -> dict[str, Document]:
    """The last half minute of both instances."""
    found = [
        span(1, "build", "llama-a", -30, -29),
        span(2, "load", "llama-a", -29, -27.5, moved_bytes=14 * GIB),
        span(3, "prefill", "llama-a", -27.5, -27, prompts=["chat-0"]),
        span(4, "turn", "llama-a", -27, -20, requests=["chat-0", "chat-3"], quota_seconds=7.0,
             outcome="quota", steps=160, kv_slabs=90, decision=DECISION),
        span(5, "prefetch", "qwen-a", -25, -21.5, moved_bytes=9 * GIB),
        span(6, "swap_out", "llama-a", -20, -19.7, requests=["chat-0", "chat-3"], moved_bytes=GIB),
        span(7, "turn", "qwen-a", -19.7, -12, requests=["chat-2"], quota_seconds=8.0,
             outcome="drained", steps=210, kv_slabs=60, decision=DECISION),
        span(8, "fill", "gemma-a", -18, -11),
        span(9, "swap_in", "llama-a", -12, -11.6, requests=["chat-0", "chat-3"], moved_bytes=GIB),
        span(10, "turn", "llama-a", -11.6, -4, requests=["chat-0", "chat-3"], quota_seconds=7.0,
             outcome="quota", steps=170, kv_slabs=90, decision=DECISION),
        span(11, "prefetch", "gemma-a", -6, None),
        span(12, "turn", "qwen-a", -4, None, requests=["chat-2", "chat-5"], quota_seconds=9.0,
             kv_slabs=60, decision=DECISION),
        span(13, "prefill", "llama-b", -24, -22, instance=1, prompts=["chat-1"]),
        span(14, "turn", "llama-b", -22, -9, instance=1, requests=["chat-1"], quota_seconds=13.0,
             outcome="preempted", steps=300, kv_slabs=40, decision=DECISION),
        span(15, "load", "phi-mini", -9, -8, instance=1, moved_bytes=3 * GIB),
        span(16, "prefill", "phi-mini", -8, -7.2, instance=1, prompts=["chat-4"]),
        span(17, "turn", "phi-mini", -7.2, None, instance=1, requests=["chat-4"],
             quota_seconds=9.0, kv_slabs=20, decision=DECISION),
    ]  # fmt: skip
    return {str(row["number"]): row for row in found}


def pool() -> Document:
    phases = ("preempted", "running", "running", "preempted", "running", "queued")
    stages = ("loaded", "loaded", "loaded", "cold", "loading", "cold")
    lately = {
        "attainment": 0.997, "ttft_p50_seconds": 0.42, "ttft_p99_seconds": 2.4,
        "tbt_p50_seconds": 0.021, "tbt_p99_seconds": 0.12,
    }  # fmt: skip
    models = {
        name: model(name, state=stage, residency={"0": stage, "1": "cold"},
                    running=int(phase == "running"), waiting=int(phase != "running"),
                    output_tokens=1000 * number)
        for number, (name, stage, phase) in enumerate(zip(MODELS, stages, phases, strict=True))
    }  # fmt: skip
    models["llama-a"] |= {"window": lately, "terms": {"pinned": True}}
    models["llama-b"] |= {"window": lately | {"attainment": 0.93}, "draining": True}
    models["phi-mini"] |= {"window": lately | {"attainment": 0.41}, "residency": {"1": "loaded"}}
    requests = [
        request(f"chat-{number}", MODELS[number % 6], phase=phase, instance=number % 2,
                arrived_unix_seconds=NOW - 30 + 5 * number, output_tokens=37 * (5 - number))
        for number, phase in enumerate(phases)
    ]  # fmt: skip
    requests[0]["reason"] = {"code": "other_model", "instance": 0, "behind": "qwen-a"}
    requests[3]["reason"] = {"code": "other_model", "instance": 0, "behind": "qwen-a"}
    requests[5]["reason"] = {"code": "loading_weights", "instance": 1}
    return {
        "version": "1.2.3",
        "started_unix_seconds": NOW - 4000,
        "readiness": {"ok": True, "reasons": []},
        "kv": {},
        "host_bytes": {
            **{f"weights:{name}": 14 * GIB for name in MODELS}, "kv": 6 * GIB, "free": 38 * GIB,
        },
        "instances": {
            "0": {
                "instance": 0, "role": "mixed", "state": "up", "pid": 4711, "model": "qwen-a",
                "pool_bytes": {
                    "weights:llama-a": 14 * GIB, "weights:qwen-a": 9 * GIB,
                    "weights:gemma-a": 5 * GIB, "kv:llama-a": 6 * GIB, "kv:qwen-a": 11 * GIB,
                    "free": 19 * GIB,
                },
                "prefetched": ["gemma-a"], "runtime_bytes": 4 * GIB, "switches": 40,
                "busy_seconds": 500.0, "moved_bytes": {"weights": 900 * GIB},
                "gpus": [{"gpu": 0, "celsius": 61.0, "power_watts": 405.0}],
            },
            "1": {
                "instance": 1, "role": "mixed", "state": "up", "pid": 4712, "model": "phi-mini",
                "pool_bytes": {
                    "weights:phi-mini": 3 * GIB, "weights:llama-b": 14 * GIB,
                    "kv:phi-mini": 2 * GIB, "free": 45 * GIB,
                },
                "prefetched": [], "runtime_bytes": 4 * GIB, "switches": 12,
                "busy_seconds": 300.0, "moved_bytes": {"weights": 200 * GIB},
                "gpus": [{"gpu": 1, "celsius": 48.0, "power_watts": 210.0}],
            },
        },
        "models": models,
        "requests": {row["id"]: row for row in requests},
        "spans": spans(),
    }  # fmt: skip


def slabs(*runs: tuple[str, int], slab_bytes: int = 64 << 20) -> Document:
    """Runs of owners; a star behind one says that something is on its way there."""
    owners = sorted({owner for owner, _ in runs})
    return {
        "slab_bytes": slab_bytes,
        "owners": [{"name": o.removesuffix("*"), "moving": o.endswith("*")} for o in owners],
        "runs": [[owners.index(owner), count] for owner, count in runs],
    }


def maps() -> dict[str, Document]:
    """Where the slabs of `pool` lie, by the path that tells it. Pools are torn by now."""
    first = slabs(
        ("weights:llama-a", 224), ("kv:llama-a", 30), ("kv:qwen-a", 60), ("weights:qwen-a", 100),
        ("free", 40), ("kv:llama-a", 26), ("kv:llama-a*", 24), ("kv:qwen-a", 90),
        ("weights:gemma-a", 31), ("weights:gemma-a*", 49), ("weights:qwen-a", 44), ("free", 190),
        ("kv:qwen-a", 26), ("kv:llama-a", 16), ("free", 74),
    )  # fmt: skip
    second = slabs(
        ("weights:llama-b", 224), ("weights:phi-mini", 48), ("kv:phi-mini", 20), ("free", 8),
        ("kv:phi-mini", 12), ("free", 712),
    )  # fmt: skip
    host = slabs(
        *((f"weights:{name}", 224) for name in MODELS[:3]), ("free", 12),
        *((f"weights:{name}", 224) for name in MODELS[3:]), ("free", 596),
        ("kv:1048576", 40), ("kv:524288", 56),
    )  # fmt: skip
    return {
        "/api/instances/0/slabs": first, "/api/instances/1/slabs": second, "/api/host/slabs": host
    }  # fmt: skip


def installed(name: str, *hooks: str, **members: object) -> Document:
    return {
        "name": name, "about": f"What {name} does.", "distribution": "appliance",
        "version": "1.2.3", "shipped": True, "hooks": list(hooks), "error": "",
    } | members  # fmt: skip


def stats(calls: int, p50: float, p99: float, most: float, faults: int = 0) -> Document:
    return {
        "calls": calls, "faults": faults, "seconds": calls * p50 * 1.25, "p50_seconds": p50,
        "p99_seconds": p99, "max_seconds": most,
    }  # fmt: skip


def policy(name: str, **members: object) -> Document:
    return {
        "name": name, "calls": 4711, "faults": 0, "faults_in_a_row": 0, "disabled": False,
        "apart": False, "busy": False, "decisions": {},
    } | members  # fmt: skip


def policies() -> Document:
    """Three decide, one of them not any more; another choice was active before."""
    both = ["aegaeon", "appliance"]
    fault = {"what": "fault", "unix_seconds": NOW - 9, "policy": "ours", "hook": "evict",
             "reason": "took longer than 50 ms", "count": 3}  # fmt: skip
    return {
        "installed": [
            installed("aegaeon", "round", "prefill", "decode"), installed("appliance", "round"),
            installed("broken", error="it cannot be imported"),
        ],
        "active": {
            "use": ["ours"], "decisions": {"round": "aegaeon"},
            "parameters": {"aegaeon": {"q_max_seconds": 3.0}},
        },
        "decisions": {
            "place": ["appliance"], "prefill": ["ours", "appliance"], "round": both,
            "evict": ["ours", "appliance"], "prefetch": ["appliance"],
        },
        "policies": [
            policy("aegaeon", decisions={"round": stats(4711, 32e-6, 210e-6, 0.0012)}),
            policy("ours", calls=7, faults=3, disabled=True, apart=True, decisions={
                "prefill": stats(4, 0.0011, 0.004, 0.0041),
                "evict": stats(3, 0.05, 0.051, 0.051, 3),
            }),
            policy("appliance", decisions={
                "place": stats(12, 90e-6, 150e-6, 160e-6),
                "prefill": stats(410, 45e-6, 0.0007, 0.002),
                "evict": stats(3, 20e-6, 31e-6, 31e-6),
            }),
        ],
        "previous": [
            {"use": ["prism"], "decisions": {}, "parameters": {}},
            {"use": ["ours"], "decisions": {}, "parameters": {"aegaeon": {"q_max_seconds": 4.0}}},
        ],
        "events": [fault, {**fault, "what": "disabled", "count": 1}],
        "autopilot": autopilot(),
    }  # fmt: skip


def step(what: str, seconds: float, reason: str, **members: object) -> Document:
    return {
        "what": what, "unix_seconds": NOW + seconds, "reason": reason, "choice": None,
        "gain": None, "error": None, "before": None, "after": None,
    } | members  # fmt: skip


def autopilot() -> Document:
    """It applied one choice and took it back, applied another one, and replays again."""
    aegaeon = {
        "use": ["ours"], "decisions": {"round": "aegaeon"},
        "parameters": {"aegaeon": {"q_max_seconds": 3.0}},
    }  # fmt: skip
    prism = {"use": ["prism"], "decisions": {}, "parameters": {}}
    won = {"gain": 0.12, "error": 0.031, "before": 0.72}
    return {
        "mode": "apply", "phase": "replaying", "held": False,
        "cpu_seconds": 90.0, "cpu_seconds_per_hour": 360.0,
        "notes": [
            step("applied", -3000, "Have prism decide: it is ahead.", choice=prism, **won),
            step("rolled_back", -2700, "55.0% of tokens and requests were in time in 300 s.",
                 choice=prism, **won | {"after": 0.55}),
            step("applied", -800, "At this hour of the week it won in 2 weeks.", choice=aegaeon,
                 **won),
            step("confirmed", -500, "812 requests and 9000 tokens in 300 s", choice=aegaeon,
                 **won | {"after": 0.81}),
            step("kept", -200, "Keep what you have: the lab is off by up to 3.1 points here, so"
                 " that may be the lab's error.", gain=0.02, error=0.031, before=0.81),
        ],
        "barred": [{"choice": prism, "until_unix_seconds": NOW + 23 * 3600}],
        "hour": [
            {"choice": aegaeon, "wins": 2, "kept": None, "gain": 0.12, "error": 0.031},
            {"choice": prism, "wins": 0, "kept": 0.55, "gain": -0.17, "error": 0.031},
        ],
    }  # fmt: skip


def config() -> Document:
    return {
        "files": ["/etc/appliance.toml", "/etc/appliance.toml.d/50-admin.toml"],
        "config": {
            "api": {"bind": "127.0.0.1:11500", "max_queue": 1024, "keys": None},
            "policy": {"use": ["aegaeon"], "aegaeon": {"q_max_seconds": 3.0}},
            "model": [{"name": "llama-a", "path": "/models/llama-a", "slo": {"ttft": "5s"}}],
        },
    }


def config_check() -> Document:
    """Two keys and a model that the files have otherwise."""
    changes = [
        {"key": "api.max_queue", "old": 1024, "new": 2048, "applies": "reload"},
        {"key": "api.bind", "old": "127.0.0.1:11500", "new": "0.0.0.0:11500", "applies": "restart"},
        {"key": "model.llama-b", "old": None, "new": "/models/llama-b", "applies": "reload"},
    ]
    return {"ok": True, "changes": changes, "problems": []}


def batch(name: str, status: str, total: int, completed: int, failed: int, age: int) -> Document:
    created = int(NOW) - age
    return {
        "id": name, "object": "batch", "endpoint": "/v1/completions", "status": status,
        "input_file_id": "file-7", "created_at": created, "expires_at": created + 24 * 3600,
        "in_progress_at": None if status == "validating" else created + 600,
        "request_counts": {"total": total, "completed": completed, "failed": failed},
        "usage": {"input_tokens": 9 * completed, "output_tokens": 20 * completed},
    }  # fmt: skip


def batches() -> Document:
    """The newest first: one that runs, one that is done, one whose file is read."""
    rows = [
        batch("batch_1", "in_progress", 1000, 431, 7, 3600),
        batch("batch_2", "completed", 20, 20, 0, 7200),
        batch("batch_3", "validating", 0, 0, 0, 5),
    ]
    return {"object": "list", "data": rows, "has_more": False}


def key(name: str, **members: object) -> Document:
    return {
        "name": name, "created_unix_seconds": NOW - 40 * 24 * 3600, "expires_unix_seconds": None,
        "expired": False, "scopes": ["infer"], "models": [], "classes": ["interactive", "batch"],
        "slo": False, "guides": True, "requests_per_minute": None, "tokens_per_minute": None,
        "tokens_per_month": None, "concurrency": None, "organization": None, "use": None,
    } | members  # fmt: skip


def keys() -> Document:
    """An operator's, three that infer within limits, one that has expired."""
    use = {"live": 2, "requests": 1234, "prompt_tokens": 98_765, "output_tokens": 54_321,
           "refusals": 7}  # fmt: skip
    quiet = dict.fromkeys(use, 0)
    rows = [
        key("operator", scopes=["infer", "admin"], slo=True, use=quiet),
        key("web", models=["llama-a"], classes=["interactive"], requests_per_minute=600,
            tokens_per_minute=20_000, concurrency=8, use=use,
            expires_unix_seconds=NOW + 20 * 24 * 3600),
        key("nightly@ci", models=["llama-a", "qwen-a"], classes=["batch"], concurrency=2,
            created_unix_seconds=NOW - 7200, expires_unix_seconds=NOW + 3600),
        key("alice", requests_per_minute=30, created_unix_seconds=NOW - 90, use=quiet),
        key("trial", expires_unix_seconds=NOW - 3600, expired=True, use=quiet),
    ]  # fmt: skip
    return {"keys": rows}


def usage() -> Document:
    """Of three keys, one of which has a budget."""
    rows = [
        {"key": key, "model": model, "requests": 40 * tokens, "input_tokens": 9000 * tokens,
         "cached_tokens": 700 * tokens, "output_tokens": 2100 * tokens,
         "gpu_seconds": 61.5 * tokens, "waiting_seconds": 7.25 * tokens}
        for tokens, (key, model) in enumerate(
            [("", "qwen-a"), ("alice", "llama-a"), ("nightly@ci", "llama-a"), ("web", "llama-a")], 1
        )
    ]  # fmt: skip
    budget = {"key": "web", "tokens_per_month": 1_000_000, "spent_tokens": 44_400,
              "renews": "2023-12-01"}  # fmt: skip
    return {"by": ["key", "model"], "since": "2023-10-15", "until": "2023-11-14", "rows": rows,
            "total": None, "budgets": [budget]}  # fmt: skip


def loaded() -> Told:
    """A pool that works: its counters went up in the last seconds."""
    before, tree = NOW - 20, pool()
    messages = [state(tree, before)]
    for second in range(1, 21):
        patch: Document = {
            "instances": {
                number: {
                    "busy_seconds": start + second * busy,
                    "switches": switches + second // 4,
                    "moved_bytes": {"weights": (start + second) * GIB},
                }
                for number, start, busy, switches in (("0", 500, 0.5, 40), ("1", 300, 0.1, 12))
            },
            "models": {
                name: {"output_tokens": 1000 * number + second * (7 * number % 40)}
                for number, name in enumerate(MODELS)
            },
        }
        messages.append(delta(patch, before + second))
    happened = [
        notice(1, "instance_up", NOW - 60, instance=0, pid=4711),
        notice(2, "request_arrived", NOW - 30, id="chat-0", model="llama-a"),
        notice(3, "model_switched", NOW - 19, instance=0, model="qwen-a"),
        notice(4, "request_rejected", NOW - 9, id="x", model="phi-mini", code="overloaded"),
    ]
    source = Told(*messages, *happened)
    for path, document in maps().items():
        source.answers["GET", path] = document
    source.answers["GET", "/api/policies"] = policies()
    source.answers["GET", "/api/config"] = config()
    source.answers["POST", "/api/config/check"] = config_check()
    source.answers["GET", "/v1/batches?limit=100"] = batches()
    source.answers["GET", "/api/keys"] = keys()
    source.answers["GET", "/api/usage?by=key,model&since=30d"] = usage()
    return source
