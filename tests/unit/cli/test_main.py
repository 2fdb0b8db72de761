"""The command line: what it prints, what it asks the daemon, and how it exits."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

import appliance
from appliance.cli.findings import Finding, Level
from appliance.cli.main import cli
from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.errors import PolicyError

Make = Callable[..., Path]

STATUS = {
    "version": "0.1.0",
    "uptime_seconds": 3.5,
    "instances": [
        {
            "instance": 0,
            "role": "mixed",
            "state": "up",
            "pid": 4711,
            "model": "llama-a",
            "pool_bytes": {"weights:llama-a": 2 << 20, "kv:llama-a": 1 << 20, "free": 5 << 20},
            "pool_high_water_bytes": 3 << 20,
        }
    ],
    "models": [
        {
            "model": "llama-a",
            "state": "device",
            "residency": {"1": "host", "0": "device"},
            "running": 2,
            "waiting": 1,
        },
        {"model": "qwen2-a", "state": "cold", "residency": {}, "running": 0, "waiting": 0},
    ],
}
MODELS = {
    "object": "list",
    "data": [
        {"id": "llama-a", "max_model_len": 1024},
        {"id": "qwen2-a", "max_model_len": 2048},
    ],
}


class Daemon(ThreadingHTTPServer):
    """Answers like a daemon; `asked` holds the bodies it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.stream = [
            ": keep-alive",
            *(event(word) for word in ("Hello", ", ", "you")),
            "data: [DONE]",
        ]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Daemon

    def do_GET(self) -> None:
        answers = {"/v1/models": MODELS, "/api/status": STATUS}
        self.answer(200, json.dumps(answers[self.path]))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        if body["model"] == "gpt-5":
            self.answer(404, json.dumps({"error": {"message": "model 'gpt-5' does not exist"}}))
        elif body["model"] == "teapot":
            self.answer(418, "short and stout")
        else:
            self.answer(200, "\n\n".join(self.server.stream) + "\n\n")

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Tests are quiet."""


def event(text: str) -> str:
    """A chunk of a streamed chat completion, as the daemon writes it: nothing is escaped that need
    not be."""
    chunk = {"choices": [{"delta": {"content": text}}]}
    return f"data: {json.dumps(chunk, ensure_ascii=False)}"


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A running stand-in for the daemon."""
    with Daemon() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def call(*arguments: str | Path, input: str | None = None) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], input=input)


def rows(result: Result) -> list[list[str]]:
    """The words of each line."""
    return [line.split() for line in result.stdout.splitlines()]


def test_version_is_the_package_s() -> None:
    """In words, and as JSON."""
    assert call("version").stdout.startswith(f"appliance {appliance.__version__} (Python 3.")
    assert json.loads(call("version", "--json").stdout)["appliance"] == appliance.__version__


def test_list_shows_every_model_with_its_state(daemon: Daemon) -> None:
    """One line for each model of the catalogue, cold ones too."""
    result = call("list", "--url", daemon.url)

    assert result.exit_code == 0
    assert rows(result) == [
        ["NAME", "CONTEXT", "STATE"],
        ["llama-a", "1024", "device"],
        ["qwen2-a", "2048", "cold"],
    ]
    assert json.loads(call("list", "--json", "--url", daemon.url).stdout) == MODELS["data"]


def test_ps_shows_models_and_instances(daemon: Daemon) -> None:
    """Who runs where, and how much of each pool is in use."""
    result = call("ps", "--url", daemon.url)

    assert result.exit_code == 0
    assert rows(result) == [
        ["NAME", "STATE", "INSTANCES", "RUNNING", "WAITING"],
        ["llama-a", "device", "0:device,", "1:host", "2", "1"],
        ["qwen2-a", "cold", "0", "0"],
        [],
        ["INSTANCE", "ROLE", "STATE", "PID", "RUNS", "USED", "POOL"],
        ["0", "mixed", "up", "4711", "llama-a", "3MiB", "8MiB"],
    ]
    assert json.loads(call("ps", "--json", "--url", daemon.url).stdout) == STATUS


def test_ps_shows_groups_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, daemon: Daemon
) -> None:
    """And how many ranks each instance has."""
    grouped = {**STATUS["instances"][0], "group": "pair", "ranks": 2}
    monkeypatch.setitem(STATUS, "instances", [grouped])

    *_, columns, instance = rows(call("ps", "--url", daemon.url))

    assert columns[-2:] == ["GROUP", "RANKS"]
    assert instance[-2:] == ["pair", "2"]


def test_run_streams_the_answer(daemon: Daemon) -> None:
    """The text of the deltas, in order, and a newline; comments are skipped."""
    result = call(
        "run", "llama-a", "Hi", "--max-tokens", "5", "--temperature", "0", "--url", daemon.url
    )

    assert (result.exit_code, result.stdout) == (0, "Hello, you\n")
    assert daemon.asked == [
        {
            "model": "llama-a",
            "messages": [{"role": "user", "content": "Hi"}],
            "stream": True,
            "max_tokens": 5,
            "temperature": 0,
        }
    ]


def test_run_streams_any_character(daemon: Daemon) -> None:
    """Also those at which text has a new line for Unicode, and none for server-sent events."""
    daemon.stream[1:-1] = [event("one\u2028two"), event("\u2029\x85\x0b"), event(" drei")]
    result = call("run", "llama-a", "Hi", "--url", daemon.url)

    assert (result.exit_code, result.stdout) == (0, "one\u2028two\u2029\x85\x0b drei\n")


def test_run_takes_the_prompt_from_standard_input(daemon: Daemon) -> None:
    """Without a prompt and a terminal, standard input is the prompt; an empty one is misuse."""
    assert call("run", "llama-a", "--url", daemon.url, input="From a pipe").exit_code == 0
    assert daemon.asked[0]["messages"] == [{"role": "user", "content": "From a pipe"}]
    assert call("run", "llama-a", "--url", daemon.url, input=" \n").exit_code == 2
    assert len(daemon.asked) == 1


def test_run_converses_on_a_terminal(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each message is sent with what was said before it, until the user leaves."""
    said = iter(["Hi", "  ", "Again", "/bye"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)

    cli.main(["run", "llama-a", "--url", daemon.url], standalone_mode=False)

    assert capsys.readouterr().out == "Hello, you\nHello, you\n"
    assert [message["content"] for message in daemon.asked[1]["messages"]] == [
        "Hi", "Hello, you", "Again",
    ]  # fmt: skip
    assert next(said, None) is None


@pytest.mark.parametrize(
    ("model", "message"),
    [("gpt-5", "error: model 'gpt-5' does not exist"), ("teapot", "answered 418")],
)
def test_run_says_what_the_daemon_refused(daemon: Daemon, model: str, message: str) -> None:
    """An error of the API is shown in its own words, and is exit status 1."""
    result = call("run", model, "Hi", "--url", daemon.url)

    assert result.exit_code == 1
    assert message in result.stderr


def test_run_reports_an_error_in_the_stream(daemon: Daemon) -> None:
    """What was said stays, then comes the error."""
    daemon.stream[2:] = ['data: {"error": {"message": "the model is gone"}}']
    result = call("run", "llama-a", "Hi", "--url", daemon.url)

    assert (result.exit_code, result.stdout) == (1, "Hello\n")
    assert "the model is gone" in result.stderr


@pytest.mark.parametrize("command", [["list"], ["ps"], ["run", "llama-a", "Hi"]])
@pytest.mark.parametrize("by_variable", [False, True])
def test_no_daemon_is_said_clearly(
    command: list[str], by_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was looked for, and how to start one."""
    with Daemon() as server:
        url = server.url  # nobody listens there once the server is closed
    if by_variable:
        monkeypatch.setenv("APPLIANCE_URL", url)
        result = call(*command)
    else:
        result = call(*command, "--url", url)

    assert result.exit_code == 1
    assert f"no daemon answers at {url}" in result.stderr
    assert "appliance serve" in result.stderr


def test_config_check_lists_the_models(tmp_path: Path, fake_checkpoint: Make) -> None:
    """A good file: its models with their sizes, as a table and as JSON, and its warnings."""
    fake_checkpoint()
    file = tmp_path / "appliance.toml"
    file.write_text(
        '[api]\nbind = "0.0.0.0:1"\nkeys = "k"\n[devices]\nmemory = "8MiB"\n'
        '[[model]]\nname = "tiny"\npath = "tiny"\nmax_context = 64\ndtype = "float32"\n',
        encoding="utf-8",
    )

    result = call("config", "check", file)

    assert result.exit_code == 0
    assert ["tiny", "LlamaForCausalLM", "float32", "1MiB", "512B", "64"] in rows(result)
    assert "warning: api.bind" in result.stderr
    (entry,) = json.loads(call("config", "check", "--json", file).stdout)
    assert entry["weight_bytes"] == 1 << 20


@pytest.mark.parametrize("command", [["config", "check"], ["serve", "--config"]])
def test_bad_configuration_is_exit_status_2(tmp_path: Path, command: list[str]) -> None:
    """Both readers of a file print every problem, one a line."""
    file = tmp_path / "appliance.toml"
    file.write_text('[devices]\nmemory = "lots"\n[[modle]]\n', encoding="utf-8")
    result = call(*command, file)

    assert result.exit_code == 2
    missing, memory, modle = result.stderr.splitlines()
    assert missing == f"{file}:1: model: is missing; add [[model]] for each model"
    assert memory.startswith(f"{file}:2: devices.memory: ")
    assert modle == f"{file}:3: modle: unknown key; did you mean model?"


def test_serve_runs_what_the_file_describes(
    tmp_path: Path, fake_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon gets the configuration, and its status is the command's; errors are said."""
    outcomes: list[int | Exception] = [3, PolicyError("no policy answered")]
    served: list[Config] = []

    def serve(config: Config, path: Path) -> int:
        assert path == file
        served.append(config)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr("appliance.serve.serve", serve)
    file = tmp_path / "appliance.toml"
    path = json.dumps(str(fake_checkpoint()))
    file.write_text(
        f'[devices]\nmemory = "8MiB"\n[[model]]\nname = "tiny"\npath = {path}\nmax_context = 64\n',
        encoding="utf-8",
    )

    assert call("serve", "--config", file).exit_code == 3
    assert served == [load_config(file)]
    result = call("serve", "--config", file)
    assert (result.exit_code, result.stderr) == (1, "error: no policy answered\n")


def test_config_sample_and_docs_print_the_generated_files() -> None:
    """What `make generate` writes is what these print."""
    root = Path(__file__).parents[3]

    assert call("config", "sample").stdout == (root / "etc/appliance.toml").read_text("utf-8")
    assert call("config", "docs").stdout == (root / "docs/configuration.md").read_text("utf-8")


@pytest.mark.parametrize(("level", "status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_doctor_prints_what_it_finds(
    monkeypatch: pytest.MonkeyPatch, level: str, status: int
) -> None:
    """One line for each check, or JSON; a failure is exit status 1."""
    asked: list[tuple[Path, bool, bool]] = []

    def examine(path: Path, *, verify: bool, ceilings: bool) -> Iterator[Finding]:
        asked.append((path, verify, ceilings))
        yield Finding(Level.OK, "python", "3.11")
        yield Finding(Level(level), "memory", "8GiB", "buy some")
        yield Finding(Level.OK, "daemon", "ready")

    monkeypatch.setattr("appliance.cli.doctor.examine", examine)

    plain = call("doctor", "--config", "my.toml", "--ceilings")
    as_json = call("doctor", "--config", "my.toml", "--verify", "--json")

    assert (plain.exit_code, as_json.exit_code) == (status, status)
    assert plain.stdout.splitlines() == [
        "ok    python  3.11",
        f"{level:<4}  memory  8GiB  buy some",
        "ok    daemon  ready",
    ]
    assert [list(row.values()) for row in json.loads(as_json.stdout)] == [
        ["ok", "python", "3.11", ""],
        [level, "memory", "8GiB", "buy some"],
        ["ok", "daemon", "ready", ""],
    ]
    assert asked == [(Path("my.toml"), False, True), (Path("my.toml"), True, False)]
    assert call("doctor", "--what").exit_code == 2


def test_demo_hands_its_options_on_and_exits_with_its_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The demo decides the exit status."""
    called: list[dict[str, Any]] = []
    module = ModuleType("appliance.demo.run")

    def main(**options: Any) -> int:
        called.append(options)
        return 1

    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "appliance.demo.run", module)

    result = call(
        "demo", "--keep", "--dir", tmp_path, "--instances", "3", "--policy", "serverlessllm"
    )

    assert result.exit_code == 1
    assert called == [
        {
            "keep": True,
            "directory": tmp_path,
            "instances": 3,
            "policy": "serverlessllm",
            "as_json": False,
        }
    ]
