"""The log of all processes: JSON for machines, lines for people; never a prompt, never a key."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any, Final, Literal, TypeAlias

import msgspec

LogFormat: TypeAlias = Literal["auto", "json", "console"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

LOGGER: Final = "appliance"
"""Above all of ours."""

FORMAT_VARIABLE: Final = "APPLIANCE_LOG_FORMAT"
"""Tells worker processes what the daemon writes."""

_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_encoder = msgspec.json.Encoder(enc_hook=str, order="deterministic")


def begin(form: LogFormat = "auto", level: LogLevel = "info") -> None:
    """Have this process write its log to standard error, and its workers do the same.

    ``auto`` is lines on a terminal, else JSON.
    """
    if form == "auto":
        form = "console" if sys.stderr.isatty() else "json"
    os.environ[FORMAT_VARIABLE] = form
    _write(_formatter(form), level, ())


def join(level: LogLevel, **fields: object) -> None:
    """The same for a worker: as the daemon writes, with these fields in every record."""
    form = os.environ.get(FORMAT_VARIABLE, "console")
    _write(_formatter(form), level, tuple(fields.items()))


def set_level(level: LogLevel) -> None:
    """Log messages of this severity and above from now on."""
    logging.getLogger(LOGGER).setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: `time` (UTC), `level`, `logger`, `message`, its own fields, and
    `exception` if there is one. For journald its priority goes before, as ``<6>``."""

    def __init__(self, *, priorities: bool = False) -> None:
        super().__init__()
        self._priorities = priorities

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "time": _moment(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        text = _encoder.encode(said).decode()
        return f"<{_priority(record.levelno)}>{text}" if self._priorities else text


class ConsoleFormatter(logging.Formatter):
    """A record as a line: local time, level, logger, message, and its fields as ``name=value``."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_plain(value)}" for name, value in fields_of(record).items())
        time_ = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{time_} {record.levelname} {record.name}: {record.getMessage()}{fields}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What was logged with ``extra={"fields": …}``."""
    found: dict[str, Any] = getattr(record, "fields", {})
    return found


class _Always(logging.Filter):
    """Gives every record these fields."""

    def __init__(self, fields: tuple[tuple[str, object], ...]) -> None:
        super().__init__()
        self._fields = dict(fields)

    def filter(self, record: logging.LogRecord) -> bool:
        record.fields = {**self._fields, **fields_of(record)}
        return True


def _write(formatter: logging.Formatter, level: LogLevel, fields: tuple[Any, ...]) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    if fields:
        handler.addFilter(_Always(fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if level != "debug":  # a line for every request that doctor, or a client of ours, sends
        logging.getLogger("httpx").setLevel(logging.WARNING)


def _formatter(form: str) -> logging.Formatter:
    if form == "console":
        return ConsoleFormatter()
    return JsonFormatter(priorities=_to_journald())


def _to_journald() -> bool:
    """Whether standard error is journald's, which names it to us (systemd.exec(5))."""
    try:
        mine = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{mine.st_dev}:{mine.st_ino}"


def _moment(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _priority(level: int) -> int:
    """syslog's number for a level."""
    return next((number for least, number in _PRIORITIES if level >= least), 7)


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)
