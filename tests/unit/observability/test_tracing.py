"""Requests as spans: what is said of them, below whose they are, and where they are sent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.recipes import RECIPES
from appliance.errors import ConfigError
from appliance.observability.tracing import OPERATIONS, Traces, otlp
from appliance.serve import make_daemon
from appliance.service.front_paths import FRONT_PATHS
from appliance.service.interface import SubmitRequest, Trace
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.daemon import Box, Client, WorkerDouble, box_maker
from tests.unit.doubles.instance import Life

MakeBox = Callable[..., Box]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
NOT_SAMPLED = f"00-{TRACE}-00f067aa0ba902b7-00"
UNIX = 1_700_000_000.0
NAMES = {
    "gen_ai.operation.name",
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "gen_ai.request.max_tokens",
    "gen_ai.response.model",
    "gen_ai.response.id",
    "gen_ai.response.finish_reasons",
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "gen_ai.latency.e2e",
    "gen_ai.latency.time_in_queue",
    "gen_ai.latency.time_in_model_prefill",
    "gen_ai.latency.time_in_model_decode",
    "gen_ai.latency.time_to_first_token",
    "appliance.load_seconds",
    "appliance.preempted_seconds",
    "appliance.preemptions",
    "appliance.late_tokens",
    "appliance.instances",
    "appliance.class",
    "url.path",
}
"""All attributes that the span of a request has."""


@pytest.fixture(autouse=True)
def quiet_library() -> Iterator[None]:
    """What `Traces` does to the library's log is undone."""
    logger = logging.getLogger("opentelemetry")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def patient_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent at the end is sent, however slow this machine is."""
    monkeypatch.setattr("appliance.observability.tracing.LAST_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def make_box(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBox]:
    with box_maker(monkeypatch, slabs=12) as make:
        yield make


def traced(box: Box, exporter: SpanExporter, **options: Any) -> Traces:
    """Have the box's daemon tell of requests from now on; its time 0 is `UNIX`."""
    traces = Traces(exporter, wall_clock=lambda: UNIX + box.now, **options)
    box.daemon._requests.trace(traces)
    return traces


def ask(box: Box, name: str, model: str, trace: Trace | None, output: int = 5) -> None:
    box.world.lives[name] = Life(model, 20, output, output)
    box.daemon.submit(
        SubmitRequest(
            id=name,
            model=model,
            prompt=tuple(range(20)),
            max_tokens=output,
            body=b"",
            trace=trace,
        ),
        Client(name),
    )


async def spans_of(traces: Traces, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """By name, when all are there."""
    await traces.stop()
    spans = exporter.get_finished_spans()
    return {span.name: span for span in spans}


async def test_a_request_is_a_span(make_box: MakeBox) -> None:
    """In the words of the conventions, below the caller's, with the phases of its life below it."""
    box, exporter = make_box(), InMemorySpanExporter()
    traces = traced(box, exporter)
    box.start()
    box.now = 10.0
    ask(box, "chatcmpl-1", "a", Trace(path="/v1/chat/completions", parent=PARENT))
    box.now = 12.0
    box.settle()

    spans = await spans_of(traces, exporter)

    span = spans["chat a"]
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == TRACE
    assert span.kind is SpanKind.SERVER
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time == int((UNIX + 10) * 1e9)
    assert span.attributes is not None
    said = dict(span.attributes)
    assert span.end_time is not None
    assert said["gen_ai.latency.e2e"] == pytest.approx((span.end_time - span.start_time) / 1e9)
    assert 2 < said["gen_ai.latency.e2e"] < 2.1
    assert said.keys() == NAMES, "no more, so no text"
    shown = (
        *("operation.name", "request.model", "response.id", "response.finish_reasons"),
        *("usage.input_tokens", "usage.output_tokens", "request.max_tokens"),
    )
    assert [said[f"gen_ai.{name}"] for name in shown] == [
        *("chat", "a", "chatcmpl-1", ("length",)),
        *(20, 5, 5),
    ]
    assert said["appliance.instances"] == (0,)
    assert said["url.path"] == "/v1/chat/completions"
    assert span.resource.attributes["service.name"] == "appliance"
    assert spans.keys() == {"chat a", "queue", "load", "prefill", "decode"} - {"queue"}


async def test_a_life_in_stretches(make_box: MakeBox) -> None:
    """Two models in memory for one: each waits while the other runs, and what it did lies in
    itself, in order, without a hole."""
    box, exporter = make_box(policy="aegaeon"), InMemorySpanExporter()
    traces = traced(box, exporter)
    box.start()
    ask(box, "ra", "a", None, output=150)
    ask(box, "rb", "b", None, output=150)
    box.settle()
    await traces.stop()
    spans = exporter.get_finished_spans()

    for root in (span for span in spans if span.parent is None):
        assert root.context is not None
        parts = [
            span
            for span in spans
            if span.parent is not None and span.parent.span_id == root.context.span_id
        ]
        lives = [part for part in parts if part.name != "load"]
        assert parts[0].start_time == root.start_time
        assert parts[-1].end_time == root.end_time
        for one, other in pairwise(lives):
            assert 0 <= other.start_time - one.end_time <= 2_000_000
            assert one.name != other.name
    assert {span.name for span in spans} == {
        *("text_completion a", "text_completion b"),
        *("queue", "load", "prefill", "decode", "preempted"),
    }


async def test_what_is_refused_is_a_span_with_an_error(make_box: MakeBox) -> None:
    """With the stable word for it, and nothing that anybody wrote."""
    box, exporter = make_box(), InMemorySpanExporter()
    traces = traced(box, exporter)
    box.start()
    with pytest.raises(Exception, match="exceed the context"):
        ask(box, "r", "a", None, output=300)

    span = (await spans_of(traces, exporter))["text_completion a"]

    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description is None
    assert span.attributes is not None
    assert span.attributes["error.type"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("ratio", "parent", "found"),
    [
        (0.0, "", 0),
        (0.0, PARENT, 1),
        (1.0, NOT_SAMPLED, 0),
        (1.0, "garbage", 1),
    ],
)
async def test_who_is_sampled(make_box: MakeBox, ratio: float, parent: str, found: int) -> None:
    """The caller says it, else the share does; a parent that is none is as if there were none."""
    box, exporter = make_box(), InMemorySpanExporter()
    traces = traced(box, exporter, sample_ratio=ratio)
    box.start()
    ask(box, "r", "a", Trace(path="/v1/messages", parent=parent))
    box.settle()

    assert ("chat a" in await spans_of(traces, exporter)) == bool(found)


@pytest.mark.parametrize(
    ("configured", "environment", "name"),
    [("", None, "appliance"), ("", "theirs", "theirs"), ("mine", "theirs", "mine")],
)
async def test_the_name_of_the_service(
    make_box: MakeBox,
    monkeypatch: pytest.MonkeyPatch,
    configured: str,
    environment: str | None,
    name: str,
) -> None:
    """The configuration goes before the environment; other attributes of that are kept."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    if environment is not None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", environment)
    box, exporter = make_box(), InMemorySpanExporter()
    traces = traced(box, exporter, service_name=configured)
    box.start()
    ask(box, "r", "a", None)
    box.settle()

    span = (await spans_of(traces, exporter))["text_completion a"]

    assert span.resource.attributes["service.name"] == name
    assert span.resource.attributes["deployment.environment.name"] == "lab"


class Broken(SpanExporter):
    """A collector that is not there, and later is."""

    def __init__(self) -> None:
        self.result = SpanExportResult.FAILURE

    def export(self, spans: Any) -> SpanExportResult:
        return self.result

    def shutdown(self) -> None:
        pass


async def test_a_collector_that_is_not_there_is_reported_once(
    make_box: MakeBox, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests do not notice; that it is back is told, too."""
    box, broken = make_box(), Broken()
    traces = traced(box, broken)
    box.start()
    for number in range(3):
        ask(box, f"r{number}", "a", None)
        box.settle()
        traces._provider.force_flush()
    assert all(life.outcome == "length" for life in box.world.lives.values())
    assert caplog.text.count("traces cannot be sent") == 1

    broken.result = SpanExportResult.SUCCESS
    ask(box, "last", "a", None)
    box.settle()
    await traces.stop()

    assert caplog.text.count("traces cannot be sent") == 1
    assert caplog.text.count("traces can be sent again") == 1


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    server: Any

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.taken.append((self.path, self.headers.get("x-tenant"), body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.taken = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("from_environment", [True, False])
async def test_a_collector_is_sent_spans(
    make_box: MakeBox,
    monkeypatch: pytest.MonkeyPatch,
    collector: Any,
    from_environment: bool,
) -> None:
    """Where the configuration or the environment says, with the headers of the environment."""
    base = f"http://127.0.0.1:{collector.server_address[1]}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=lab")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(PATIENCE_SECONDS))
    if from_environment:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", base)
    box = make_box()
    traces = traced(box, otlp("" if from_environment else base))
    box.start()
    ask(box, "r", "a", Trace(path="/api/chat", parent=PARENT))
    box.settle()
    await traces.stop()

    sent = [ExportTraceServiceRequest.FromString(body) for _, _, body in collector.taken]
    spans = [
        span
        for part in sent
        for one in part.resource_spans
        for scope in one.scope_spans
        for span in scope.spans
    ]
    assert {(path, tenant) for path, tenant, _ in collector.taken} == {("/v1/traces", "lab")}
    assert "chat a" in {span.name for span in spans}
    assert {span.trace_id.hex() for span in spans} == {TRACE}


def test_operations_are_of_paths_that_there_are() -> None:
    """Everything else goes on with a text, or has no name of its own."""
    assert OPERATIONS.keys() <= FRONT_PATHS
    rest = FRONT_PATHS - OPERATIONS.keys()
    assert {"/v1/completions", "/api/generate", "/tokenize"} <= rest


def test_addresses_of_collectors() -> None:
    """With the path or without, and a slash at the end."""
    for endpoint in ("http://c:1", "http://c:1/", "http://c:1/v1/traces"):
        assert otlp(endpoint)._endpoint == "http://c:1/v1/traces"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('endpoint = "localhost:4318"', "'localhost:4318' is not the address of an HTTP server"),
        ("sample_ratio = 1.5", "sample_ratio"),
        ("traces = 1", "traces"),
    ],
)
def test_what_cannot_be_configured(
    tmp_path: Path, fake_checkpoint: Callable[..., Path], text: str, wrong: str
) -> None:
    """It is refused, with the key."""
    fake_checkpoint()
    path = tmp_path / "appliance.toml"
    path.write_text(
        f'[telemetry]\n{text}\n[devices]\nmemory = "8MiB"\n'
        '[[model]]\nname = "a"\npath = "tiny"\nmax_context = 64\n'
    )
    with pytest.raises(ConfigError) as refused:
        load_config(path)

    (problem,) = refused.value.problems
    assert "telemetry." in str(problem)
    assert wrong in str(problem)


def test_the_extra_is_asked_for(
    tmp_path: Path, fake_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it traces are refused when the configuration is read."""
    fake_checkpoint()
    path = tmp_path / "appliance.toml"
    path.write_text(
        '[telemetry]\ntraces = true\n[devices]\nmemory = "8MiB"\n'
        '[[model]]\nname = "a"\npath = "tiny"\nmax_context = 64\n'
    )
    assert load_config(path).telemetry.traces
    monkeypatch.setattr("appliance.config.checks._has_opentelemetry", lambda: False)

    with pytest.raises(ConfigError, match='install the extra "otel"'):
        load_config(path)


@pytest.mark.parametrize("on", [True, False])
async def test_the_daemon_of_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    """It tells of requests if it is to, and only then keeps when their phases were."""
    make_checkpoints(tmp_path, recipes=[RECIPES[0]])
    file = write_config(tmp_path, [RECIPES[0].name], host_cache="64MiB")
    file.write_text(f"{file.read_text()}\n[telemetry]\ntraces = {str(on).lower()}\n")
    monkeypatch.setattr("appliance.daemon.daemon.WorkerProcess", WorkerDouble)

    daemon = make_daemon(load_config(file))

    requests = daemon._requests
    assert isinstance(requests._traces, Traces) == requests.phases.keeps_stretches == on
    await daemon.stop()
