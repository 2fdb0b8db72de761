"""`run` for models that are not served yet, and the daemon of the user's own."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from appliance.checkpoints.sources import DirectorySource, Source
from appliance.cli.main import cli
from appliance.cli.start import own_daemon
from appliance.cli.start.chat import _StateLine
from appliance.cli.start.folders import models_folder
from appliance.cli.start.own_daemon import operators_url, own_address, start_own_daemon
from appliance.errors import ApplianceError
from appliance.platform import machine_memory
from appliance.platform.admin_socket import open_socket
from appliance.platform.machine_memory import MachineMemory
from appliance.units import Address
from appliance.user_folders import state_folder
from tests.conftest import write_checkpoint
from tests.unit.cli.test_main import event

HELLO = "".join(f"{line}\n\n" for line in (event("Hello"), "data: [DONE]"))


class Daemon(ThreadingHTTPServer):
    """Serves `models`; those of `hub` come when they are pulled."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = {"small", "org/small"}
        self.hub = {"org/new"}
        self.asked: list[tuple[str, str]] = []
        self.said: list[list[dict[str, str]]] = []
        self.added: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Daemon

    def do_GET(self) -> None:
        self.answer(json.dumps({"data": [{"id": name} for name in sorted(self.server.models)]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/api/models":
            self.server.added.append((body["name"], body["path"]))
            self.server.models.add(body["name"])
            self.answer("{}")
            return
        self.server.asked.append((self.path, body["model"]))
        if self.path == "/v1/chat/completions" and body["messages"][-1]["content"] == "bad":
            self.server.said.append(body["messages"])
            self.answer(json.dumps({"error": {"message": "it is too long"}}), 400)
        elif self.path == "/v1/chat/completions":
            assert body["model"] in self.server.models
            self.server.said.append(body["messages"])
            self.answer(HELLO)
        elif body["model"].partition("@")[0] in self.server.hub:
            self.server.models.add(body["model"].partition("@")[0])
            size = {"total": 4 << 20, "completed": 4 << 20}
            lines = [
                {"status": "pulling manifest"},
                {"status": "pulling model.safetensors", "digest": "sha256:0", **size},
                {"status": "success"},
            ]
            self.answer("".join(f"{json.dumps(line)}\n" for line in lines))
        else:
            self.answer(json.dumps({"error": "the hub does not give it"}) + "\n")

    def answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Tests are quiet."""


@contextmanager
def running(daemon: Daemon) -> Iterator[Daemon]:
    thread = threading.Thread(target=daemon.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield daemon
    finally:
        daemon.shutdown()
        thread.join()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as server, running(server):
        yield server


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user with one model, on a machine of 24 GiB."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    memory = MachineMemory(24 << 30, 20 << 30)
    monkeypatch.setattr(machine_memory, "read_memory", lambda: memory)
    models = tmp_path / "appliance" / "models"
    models.mkdir(parents=True)
    write_checkpoint(models / "mine")
    return models


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["run", *arguments])


# --- where a daemon runs -------------------------------------------------------------------------


def test_what_is_served_is_not_pulled(daemon: Daemon) -> None:
    """Also if its name is that of a hub's model. Whether it is a revision is not known."""
    for name in ("small", "org/small", "org/small@main"):
        result = call(name, "Hi", "--url", daemon.url)
        assert (result.exit_code, result.stdout) == (0, "Hello\n")
        noted = "org/small is there already, and may be another revision than main"
        assert (noted in result.stderr) == ("@" in name)
    assert {path for path, _ in daemon.asked} == {"/v1/chat/completions"}


def test_a_model_of_a_hub_is_pulled_by_the_daemon(daemon: Daemon) -> None:
    """Once, with its progress on standard error; the answer alone is on standard output."""
    first = call("org/new@v1", "Hi", "--url", daemon.url)
    second = call("org/new", "Hi", "--url", daemon.url)

    assert (first.exit_code, first.stdout) == (0, "Hello\n")
    assert first.stderr == "fetched model.safetensors (4MiB)\n"
    assert (second.stdout, second.stderr) == ("Hello\n", "")
    assert daemon.asked == [
        ("/api/pull", "org/new@v1"),
        ("/v1/chat/completions", "org/new"),
        ("/v1/chat/completions", "org/new"),
    ]


def test_a_pull_that_fails(daemon: Daemon) -> None:
    """Ends the command with its words."""
    result = call("org/none", "Hi", "--url", daemon.url)

    assert (result.exit_code, result.stderr) == (1, "error: the hub does not give it\n")
    assert [path for path, _ in daemon.asked] == ["/api/pull"]


@pytest.mark.parametrize("name", ["./small", "../models/x", "~/models", "-x", "größe"])
def test_what_cannot_be_a_name(daemon: Daemon, name: str) -> None:
    """Nothing is asked of the daemon."""
    result = call("--url", daemon.url, "--", name, "Hi")

    assert result.exit_code == 2
    assert "directories are served by `appliance serve DIR`" in result.stderr
    assert daemon.asked == []


# --- a conversation ------------------------------------------------------------------------------


@pytest.fixture
def conversation(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Has a user type lines, or keys that interrupt, at a terminal; what each request says."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)

    def type_all(*lines: str | BaseException | type[BaseException]) -> list[list[str]]:
        typed = iter([*lines, EOFError])

        def read(_: str) -> str:
            line = next(typed)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        cli.main(["run", "small", "--url", daemon.url], standalone_mode=False)
        assert next(typed, None) is None
        return [[message["content"] for message in asked] for asked in daemon.said]

    return type_all


def test_a_conversation_is_forgotten(conversation: Callable[..., list[list[str]]]) -> None:
    """At the user's word; until then everything is sent again."""
    asked = conversation("one", "two", "/clear", "three")

    assert asked == [["one"], ["one", "Hello", "two"], ["three"]]


def test_a_message_of_several_lines(conversation: Callable[..., list[list[str]]]) -> None:
    """Between triple quotation marks, in one line or more."""
    asked = conversation(
        '"""one', "", 'two"""', "/clear", '"""three"""', "/clear", '"""', "x", '"""'
    )

    assert asked == [["one\n\ntwo"], ["three"], ["x"]]


def test_an_interrupt_at_the_prompt_ends_nothing(
    conversation: Callable[..., list[list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what does. So does the help."""
    asked = conversation(KeyboardInterrupt, "one", "/?")

    said = capsys.readouterr()
    assert asked == [["one"]]
    assert "Ctrl-D or /bye ends the conversation.\n" in said.err
    assert "/clear    forget what was said\n" in said.err
    assert said.out == "Hello\n"


def test_an_interrupt_stops_an_answer(
    conversation: Callable[..., list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came of it belongs to the conversation."""
    lines: Iterator[str | type[BaseException]] = iter(
        [event("Hel"), KeyboardInterrupt, event("lo"), "data: [DONE]"]
    )

    def interrupted(_: object) -> Iterator[str]:
        for line in lines:
            if not isinstance(line, str):
                raise line
            yield line

    monkeypatch.setattr("appliance.cli.start.chat.event_lines", interrupted)

    assert conversation("one", "two") == [["one"], ["one", "Hel", "two"]]


def test_an_answer_that_never_began_is_forgotten(
    conversation: Callable[..., list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its question: an empty answer would go with all later requests."""
    answers = iter([[], [event("Hello"), "data: [DONE]"]])

    def first_interrupted(_: object) -> Iterator[str]:
        lines = next(answers)
        if not lines:
            raise KeyboardInterrupt
        yield from lines

    monkeypatch.setattr("appliance.cli.start.chat.event_lines", first_interrupted)

    assert conversation("one", "two") == [["one"], ["two"]]


def test_a_conversation_goes_on_after_an_error(
    conversation: Callable[..., list[list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the daemon, or of what was typed. The message that it is about is forgotten."""
    not_text = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    asked = conversation("one", "bad", not_text, "two")

    assert asked == [["one"], ["one", "Hello", "bad"], ["one", "Hello", "two"]]
    said = capsys.readouterr()
    assert said.err.endswith(
        "error: it is too long\nthe conversation goes on; Ctrl-D or /bye ends it\n"
        "that was no UTF-8; type the message again\n\n"
    )
    assert said.out == "Hello\nHello\n"


def test_an_answer_does_not_wait_for_the_state_of_its_model(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line that tells of the state goes at once, although the daemon does not answer."""
    asked, go, late = threading.Event(), threading.Event(), threading.Event()

    def silent(handler: Handler) -> None:
        if handler.path.startswith("/api/models/"):
            asked.set()
            if not go.wait(10):
                late.set()
        Handler.answer(handler, json.dumps({"state": "loading"}))

    monkeypatch.setattr(Handler, "do_GET", silent)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("appliance.cli.start.chat.POLL_SECONDS", 0.0)
    line = _StateLine(daemon.url, "small")
    with line:
        asked.wait()
        line.end()
        go.set()
    assert not late.is_set()


# --- where none runs -----------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Daemon]]:
    """Daemons that were started, in this process and without models."""
    found: list[Daemon] = []

    def start(url: str, address: Address) -> None:
        daemon = Daemon()
        daemon.socket.close()
        daemon.socket = socket.create_server(("127.0.0.1", address.port))
        daemon.models = {"mine", "org/tiny"}
        found.append(daemon)
        threading.Thread(target=daemon.serve_forever, kwargs={"poll_interval": 0.01}).start()

    monkeypatch.setattr("appliance.cli.start.run.start_own_daemon", start)
    yield found
    for daemon in found:
        daemon.shutdown()
        daemon.server_close()


def free_url() -> str:
    with Daemon() as server:
        return server.url  # nothing listens there once it is closed


def test_a_model_of_the_user_is_served_by_a_daemon_of_its_own(
    home: Path, started: list[Daemon]
) -> None:
    """Started once."""
    url = free_url()
    answers = [call("mine", "Hi", "--url", url) for _ in range(2)]

    assert [(one.exit_code, one.stdout) for one in answers] == [(0, "Hello\n")] * 2
    assert len(started) == 1


def test_a_model_that_is_not_there_is_pulled_before(
    home: Path, started: list[Daemon], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Into the user's folder, from a hub: a directory of that name here is others'."""
    asked: list[str] = []

    def hub(text: str) -> Source:
        asked.append(text)
        return DirectorySource(write_checkpoint(tmp_path / "hub"))

    monkeypatch.setattr("appliance.checkpoints.pull.hub_source", hub)
    (tmp_path / "here" / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")

    result = call("org/tiny", "Hi", "--url", free_url())

    assert (result.exit_code, result.stdout) == (0, "Hello\n"), result.output
    assert "fetched model.safetensors (1.0MiB)\n" in result.stderr
    assert (home / "org--tiny" / "model.safetensors").is_file()
    assert asked == ["org/tiny"]
    assert len(started) == 1


def test_a_daemon_that_another_command_started_learns_of_the_model(
    home: Path, started: list[Daemon]
) -> None:
    """It looked through the folder before the model was there."""
    write_checkpoint(home / "later")

    result = call("later", "Hi", "--url", free_url())

    assert (result.exit_code, result.stdout) == (0, "Hello\n"), result.output
    assert started[0].added == [("later", str(home / "later"))]


def test_what_does_not_answer_gets_no_rival(
    home: Path, started: list[Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process listens, and says nothing."""
    monkeypatch.setattr("appliance.cli.start.run.LIST_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = call("mine", "Hi", "--url", url)

    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {url} is in use, and no daemon answers there")
    assert started == []


def test_what_there_is_not(home: Path, started: list[Daemon]) -> None:
    """Neither at an address of this machine, nor in the user's folder."""
    url = free_url()
    result = call("other", "Hi", "--url", url)

    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: no daemon answers at {url}")
    assert f"{home} has no model other" in result.stderr
    assert started == []


def test_two_models_of_one_name(home: Path, started: list[Daemon]) -> None:
    """Cannot be chosen by it, as the command has no option for names; others are served."""
    for folder in ("a b", "a-b"):
        write_checkpoint(home / folder)
    result = call("a-b", "Hi", "--url", free_url())
    other = call("mine", "Hi", "--url", free_url())

    assert result.exit_code == 1
    assert result.stderr == (
        f"error: not served: a-b is the name of {home}/a b and of {home}/a-b; rename one of them\n"
        f"not served: a-b is the name of {home}/a-b and of {home}/a b; rename one of them\n"
    )
    assert other.exit_code == 0, other.stderr
    assert len(started) == 1


def test_a_model_whose_name_is_not_that_of_its_folder(
    home: Path, started: list[Daemon], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Folders have two hyphens for a slash, so `my--a--b` would be called otherwise."""
    source = DirectorySource(write_checkpoint(tmp_path / "hub"))
    monkeypatch.setattr("appliance.checkpoints.pull.hub_source", lambda _: source)

    result = call("my/a--b", "Hi", "--url", free_url())

    assert (result.exit_code, result.stdout) == (0, "Hello\n"), result.output
    assert started[0].added == [("my/a--b", str(home / "my--a--b"))]


def test_a_model_that_cannot_be_served(home: Path, started: list[Daemon]) -> None:
    """Is found out before a daemon starts."""
    (home / "mine" / "tokenizer.json").unlink()
    result = call("mine", "Hi", "--url", free_url())

    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: not served: {home}/mine has no tokenizer")
    assert "copy the model's there" in result.stderr
    assert started == []


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1:1", "http://192.0.2.1:1", "unix:/no/such", "http://127.0.0.1:1/llm"]
)
def test_an_address_of_others(
    home: Path, started: list[Daemon], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is started for it."""
    monkeypatch.setattr("appliance.client.CONNECT_SECONDS", 0.01)
    result = call("mine", "Hi", "--url", url)

    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: no daemon answers at {url}")
    assert started == []


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:11500", "127.0.0.1:11500"),
        ("http://localhost:1234/", "localhost:1234"),
        ("http://[::1]:1234", "[::1]:1234"),
        ("http://localhost", "localhost:80"),
        ("https://localhost:1234", None),
        ("http://localhost:1234/llm", None),
        ("http://example.org:1234", None),
        ("unix:/run/admin.sock", None),
        ("http://[::1", None),
    ],
)
def test_where_a_daemon_of_the_user_listens(url: str, address: str | None) -> None:
    """At addresses that only this machine reaches."""
    assert own_address(url) == address


# --- its process ---------------------------------------------------------------------------------

READY = """
import http.server, sys
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    log_message = lambda *_: None
host, port = sys.argv[1].split(":")
print("it starts", flush=True)
http.server.HTTPServer((host, int(port)), Ready).serve_forever()
"""
ENDS = "import sys; print('line one\\nno room', file=sys.stderr); sys.exit(3)"


@pytest.fixture
def program(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[tuple[str, ...]]]:
    """Has a program take the place of the daemon's; the command lines that it was given."""

    def use(code: str) -> list[tuple[str, ...]]:
        commands: list[tuple[str, ...]] = []

        def command(module: str, *arguments: str) -> tuple[str, ...]:
            commands.append((module, *arguments))
            bind = tomllib.loads(Path(arguments[-1]).read_text())["api"]["bind"]
            return (sys.executable, "-c", code, bind)

        monkeypatch.setattr(own_daemon, "module_command", command)
        return commands

    return use


def test_the_process_outlives_the_command(
    home: Path,
    program: Callable[[str], list[tuple[str, ...]]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """It is in a session of its own, and its log, and how to stop it, are said. It is not started
    twice."""
    commands = program(READY)
    url = free_url()
    address = own_address(url)
    assert address is not None

    start_own_daemon(url, address)
    start_own_daemon(url, address)

    said = capsys.readouterr().err
    pid = int(said.rpartition("kill ")[2])
    try:
        assert os.getsid(pid) == pid
        state = tmp_path / "state" / "appliance"
        file = state / f"daemon-{address.port}" / "appliance.toml"
        assert commands == [("appliance", "serve", str(file))]
        written = tomllib.loads(file.read_text())
        assert written["api"] == {
            "bind": str(address),
            "admin_socket": str(state / f"daemon-{address.port}.sock"),
        }
        assert [model["path"] for model in written["model"]] == [str(home / "mine")]
        log = state / f"daemon-{address.port}.log"
        assert said == (f"starting a daemon at {url}; its log is {log}; stop it with: kill {pid}\n")
        assert log.read_text() == "it starts\n"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_daemon_that_still_starts_gets_no_rival(
    program: Callable[[str], list[tuple[str, ...]]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The command that started it was interrupted; the next one waits for it."""
    go = tmp_path / "go"
    os.mkfifo(go)
    gate = os.open(go, os.O_RDWR)
    commands = program(f"import os\nos.read(os.open({str(go)!r}, os.O_RDONLY), 1)" + READY)
    url = free_url()
    address = own_address(url)
    assert address is not None

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("appliance.cli.start.own_daemon.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start_own_daemon(url, address)
    pid = int(capsys.readouterr().err.rpartition("kill ")[2])
    try:
        monkeypatch.setattr(
            "appliance.cli.start.own_daemon.time.sleep", lambda _: os.write(gate, b".")
        )
        start_own_daemon(url, address)
    finally:
        os.close(gate)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    assert len(commands) == 1
    assert f"another command started the daemon at {url}" in capsys.readouterr().err


def test_a_daemon_that_ends_at_once(
    program: Callable[[str], list[tuple[str, ...]]], tmp_path: Path
) -> None:
    """The end of its log says why. The log of the daemon before stays."""
    program(ENDS)
    url = free_url()
    address = own_address(url)
    assert address is not None

    for _ in range(2):
        with pytest.raises(ApplianceError, match=r"ended with status 3:\nline one\nno room$"):
            start_own_daemon(url, address)

    log = tmp_path / "state" / "appliance" / f"daemon-{address.port}.log"
    assert log.read_text() == "line one\nno room\n" * 2


def test_operators_have_the_socket_of_the_daemon(home: Path) -> None:
    """If it listens there; a daemon of others is asked at its address."""
    url = "http://127.0.0.1:1234"
    path = state_folder() / "daemon-1234.sock"
    assert operators_url(url) == url
    with open_socket(path):
        assert operators_url(url) == f"unix:{path}"
        assert operators_url("http://127.0.0.1:1235") == "http://127.0.0.1:1235"
        assert operators_url("unix:/x.sock") == "unix:/x.sock"
    assert operators_url(url) == url


def test_a_socket_s_path_has_room(
    program: Callable[[str], list[tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No daemon starts without the socket."""
    commands = program(ENDS)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ("x" * 100)))
    url = free_url()
    address = own_address(url)
    assert address is not None

    with pytest.raises(ApplianceError, match=r"too long .* set \$XDG_STATE_HOME"):
        start_own_daemon(url, address)
    assert commands == []


# --- its folders ---------------------------------------------------------------------------------


def test_the_user_s_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the rules of XDG: a path that is not absolute counts for nothing."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("", "relative"):
        monkeypatch.setenv("XDG_DATA_HOME", given)
        monkeypatch.setenv("XDG_STATE_HOME", given)
        assert models_folder() == tmp_path / ".local/share/appliance/models"
        assert state_folder() == tmp_path / ".local/state/appliance"
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert models_folder() == Path("/data/appliance/models")


@pytest.mark.parametrize("command", [["serve", "models"], ["init", "models"], ["run", "m", "Hi"]])
def test_a_user_without_a_home(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is told what to set."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("XDG_DATA_HOME", "")
    monkeypatch.setenv("APPLIANCE_URL", free_url())
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(cli, command)

    assert result.exit_code == 1
    assert "this user has no home directory; set $XDG_DATA_HOME" in result.stderr
