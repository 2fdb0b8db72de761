"""One box of the fleet: `python -m tests.fleet.daemon CHECKPOINTS FOLDER PORT MODEL…`, in the
appliance's own environment. It writes its daemon's process id, and ends when its input does."""

from __future__ import annotations

import sys
from pathlib import Path

from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.run import running_daemon

HOST_CACHE, MEMORY = "256MiB", "48MiB"
"""The pool has room for about two of these models, the host cache for all."""
DRAIN = '[api]\ndrain = "300s"\n'
"""Whatever has begun when a box is to end, ends well."""


def main(checkpoints: Path, folder: Path, port: int, models: list[str]) -> None:
    make_checkpoints(checkpoints, models)
    text = write_config(
        checkpoints,
        models,
        bind=f"127.0.0.1:{port}",
        instances=1,
        memory=MEMORY,
        host_cache=HOST_CACHE,
        short_turns=True,
    ).read_text(encoding="utf-8")
    file = folder / "appliance.toml"
    file.write_text(text.replace("[api]\n", DRAIN), encoding="utf-8")
    with running_daemon(file, load_config(file)) as (_, pid):
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
