"""A hub on this machine: what a pull asks of one over HTTP, as `huggingface_hub` asks it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

COMMIT: Final = "0123456789abcdef" * 2 + "01234567"
"""The one revision of every model here, `main`."""


@contextmanager
def hub(models: Mapping[str, Path]) -> Iterator[str]:
    """The URL of a hub with these models, by ``org/name``; `HF_ENDPOINT` leads clients to it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(models))
    thread = threading.Thread(target=server.serve_forever, name="hub", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(models: Mapping[str, Path]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0].strip("/")
            for name, folder in models.items():
                if path in (f"api/models/{name}", f"api/models/{name}/revision/main"):
                    body = json.dumps(_described(name, folder)).encode()
                    self._send(body, "application/json", with_body=with_body)
                    return
                file = path.removeprefix(f"{name}/resolve/{COMMIT}/")
                if file != path and (folder / file).is_file():
                    body = (folder / file).read_bytes()
                    self._send(body, "application/octet-stream", with_body=with_body)
                    return
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send(self, body: bytes, kind: str, *, with_body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    return Handler


def _described(name: str, folder: Path) -> dict[str, Any]:
    siblings: list[dict[str, Any]] = []
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        content = file.read_bytes()
        row: dict[str, Any] = {"rfilename": file.name, "size": len(content)}
        if file.suffix == ".safetensors":
            digest = hashlib.sha256(content).hexdigest()
            row["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
        siblings.append(row)
    return {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
