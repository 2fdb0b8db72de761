"""One box of the fleet: `python -m tests.fleet.daemon CHECKPOINTS FOLDER PORT MODEL…`, in the
appliance's own environment. It writes its daemon's process id, and ends when its input does."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.run import running_daemon

HOST_CACHE, MEMORY = "256MiB", "64MiB"
"""The pool has room for two of these models and the KV of their requests, not for all four of a
box; the host cache for all."""
DRAIN = '[api]\ndrain = "300s"\n'
"""Whatever has begun when a box is to end, ends well."""
KEYS = 'keys = "{keys}"\nopen_metrics = true\n'


def main(
    checkpoints: Path,
    folder: Path,
    port: int,
    models: list[str],
    keys: Path | None,
    *,
    short_turns: bool,
) -> None:
    make_checkpoints(checkpoints, models)
    text = write_config(
        checkpoints,
        models,
        bind=f"127.0.0.1:{port}",
        instances=1,
        memory=MEMORY,
        host_cache=HOST_CACHE,
        short_turns=short_turns,
    ).read_text(encoding="utf-8")
    api = DRAIN
    if keys is not None:  # the status is asked for on the operators' socket, which needs none
        api += KEYS.format(keys=keys)
        text = text.replace('admin_socket = ""', f'admin_socket = "{folder / "admin.sock"}"')
    file = folder / "appliance.toml"
    file.write_text(text.replace("[api]\n", api), encoding="utf-8")
    with running_daemon(file, load_config(file)) as (_, pid):
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--keys", type=Path, help="a file of keys; metrics are open with it")
    parser.add_argument("--short-turns", action="store_true", help="models take turns sooner")
    main(**vars(parser.parse_args()))
