"""The log: JSON or lines, one line for each request, nothing of what was said."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.engines.protocol import Produced
from appliance.http.server_timing import server_timing
from appliance.observability.request_log import log_request
from appliance.platform import logs
from appliance.platform.logs import ConsoleFormatter, JsonFormatter
from appliance.service.generation import RequestStream
from appliance.service.interface import GenerationFailed, RequestTimes, SubmitRequest
from appliance.vocabulary import FinishReason
from tests.docblocks import code_blocks
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.daemon import Client

DOCUMENT = Path(__file__).parents[3] / "docs" / "logs.md"
SAY = "import logging; logging.getLogger('a.b').warning('it %s', 'is', extra={'fields': {'n': 2}})"
TIMES = RequestTimes(
    queue_seconds=0.5,
    load_seconds=0.25,
    prefill_seconds=0.125,
    decode_seconds=1.0,
    preempted_seconds=0.0625,
    preemptions=2,
    instances=(0, 1),
)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "appliance.requests"):
        yield caplog


MOMENT = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def written(program: str, **environment: str) -> str:
    """What a process that logs writes to standard error, a pipe."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    return done.stderr.decode()


def stream(tokens: int, kind: str = "r") -> RequestStream:
    """A request whose tokens came one second after the other."""
    request = SubmitRequest(
        id=kind,
        model="m",
        prompt=(7777, 8888, 9999),
        max_tokens=9,
        body=b"",
        key="laptop",
    )
    made = RequestStream(request, 10.0, Client(kind), lambda _: None, lambda *_: None)
    for number in range(tokens):
        made.push(Produced(request=kind, token=4242 + number))
        made.newest = 12.0 + number
        made.first = 12.0
    return made


def test_a_pipe_gets_json() -> None:
    """An object in a line, with the record's own fields."""
    said = json.loads(written(f"from appliance.platform import logs; logs.begin(); {SAY}"))

    assert said.pop("time").endswith("Z")
    assert said == {"level": "warning", "logger": "a.b", "message": "it is", "n": 2}


def test_lines_for_people() -> None:
    """The same as a line with the time, where it was asked for."""
    text = written(f"from appliance.platform import logs; logs.begin('console'); {SAY}")

    assert re.fullmatch(rf"{MOMENT} WARNING a.b: it is n=2\n", text)


def test_what_is_not_urgent_is_left_out() -> None:
    """Nothing below the level is written."""
    assert written(f"from appliance.platform import logs; logs.begin('json', 'error'); {SAY}") == ""


def test_workers_write_as_the_daemon_does() -> None:
    """In its form, each with what tells it from the others."""
    program = f"from appliance.platform import logs; logs.join('warning', instance=3); {SAY}"

    assert json.loads(written(program, APPLIANCE_LOG_FORMAT="json"))["instance"] == 3
    line = written(program, APPLIANCE_LOG_FORMAT="console")
    assert re.fullmatch(rf"{MOMENT} WARNING a.b: it is instance=3 n=2\n", line)


def test_begin_tells_workers_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the environment that they inherit."""
    monkeypatch.setenv(logs.FORMAT_VARIABLE, "")
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        logs.begin("console", "error")
        assert os.environ[logs.FORMAT_VARIABLE] == "console"
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def test_journald_gets_the_priority() -> None:
    """Where standard error is journald's, and only there."""
    program = f"from appliance.platform import logs; logs.begin(); {SAY}"
    name_it = "import os; s = os.fstat(2); os.environ['JOURNAL_STREAM'] = f'{s.st_dev}:{s.st_ino}'"

    assert written(f"{name_it}; {program}").startswith("<4>{")
    assert written(program, JOURNAL_STREAM="1:2").startswith("{")


@pytest.mark.parametrize("formatter", [JsonFormatter(), ConsoleFormatter()])
def test_errors_come_with_where_they_were(formatter: logging.Formatter) -> None:
    """A traceback, in either form; in JSON it is still one line."""
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "", 1, "bad", (), sys.exc_info())

    text = formatter.format(record)

    assert "ValueError: no" in text
    if isinstance(formatter, JsonFormatter):
        assert "Traceback" in json.loads(text)["exception"]
        assert "\n" not in text


def test_the_line_of_a_request(lines: pytest.LogCaptureFixture) -> None:
    """Sizes, times and outcome, under the names that are documented."""
    log_request(stream(3), TIMES, FinishReason.LENGTH, None, now=14.5)

    (record,) = lines.records
    found = json.loads(JsonFormatter().format(record))
    times = {key: value for key, value in found.items() if key.endswith("_seconds")}
    assert times == {
        "queue_seconds": 0.5,
        "load_seconds": 0.25,
        "prefill_seconds": 0.125,
        "decode_seconds": 1.0,
        "preempted_seconds": 0.0625,
        "ttft_seconds": 2.0,
        "mean_tbt_seconds": 1.0,
    }
    assert (found["outcome"], found["status"], found["seconds"]) == ("length", 200, 4.5)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (3, 3)
    assert (found["preemptions"], found["instances"], found["key"]) == (2, [0, 1], "laptop")
    document = DOCUMENT.read_text()
    for name in logs.fields_of(record):
        assert f"`{name}`" in document


def test_the_line_holds_nothing_of_what_was_said(lines: pytest.LogCaptureFixture) -> None:
    """Neither tokens of the prompt nor of the answer."""
    log_request(stream(3), TIMES, FinishReason.STOP, None, now=14.5)

    text = JsonFormatter().format(lines.records[0])

    assert not any(token in text for token in ("7777", "8888", "9999", "4242", "4243"))


@pytest.mark.parametrize(
    ("outcome", "failure", "status"),
    [
        (FinishReason.CANCELLED, None, 499),
        (FinishReason.ERROR, None, 500),
        ("shutting_down", GenerationFailed("shutting_down", "it ends", 503), 503),
    ],
)
def test_the_line_of_what_went_wrong(
    lines: pytest.LogCaptureFixture, outcome: str, failure: GenerationFailed | None, status: int
) -> None:
    """Its status is what the client was answered, or 499 if it had left; no token, no times."""
    log_request(stream(0), RequestTimes(), outcome, failure, now=11.0)

    fields = logs.fields_of(lines.records[0])
    assert (fields["outcome"], fields["status"]) == (str(outcome), status)
    assert fields.get("reason") == (failure.message if failure else None)
    assert not {"ttft_seconds", "mean_tbt_seconds"} & fields.keys()
    assert math.isclose(float(fields["seconds"]), 1.0)


def test_the_times_of_a_stream_are_written_as_the_document_shows_them() -> None:
    (block,) = code_blocks("docs/logs.md", "text")
    times = RequestTimes(
        queue_seconds=0.0031,
        load_seconds=0.1204,
        prefill_seconds=0.018,
        decode_seconds=0.4027,
        preempted_seconds=0.0952,
        preemptions=2,
        instances=(),
    )

    assert block.text == f": server-timing: {server_timing(times)}\n"
