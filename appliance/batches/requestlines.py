"""The input of a batch: a request a line. Which of them can be used, and where each is."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec

from appliance.batches.records import Problem

MAX_PROBLEMS: Final = 100
"""No more are listed: what is wrong with all lines is seen from these."""
_MAX_CUSTOM_ID: Final = 512


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the input: what to ask of which endpoint. `body` is what HTTP would send there."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Asked(msgspec.Struct, frozen=True):
    model: str


_line_decoder = msgspec.json.Decoder(RequestLine)
_model_decoder = msgspec.json.Decoder(_Asked)


class InputRefused(Exception):
    """Nothing of a batch's input is used, as something is wrong with it."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


class InputLost(Exception):
    """An input file cannot be read any more, or is another one."""

    @classmethod
    def because(cls, error: OSError) -> InputLost:
        return cls(f"the input file cannot be read: {error.strerror}")


class RequestLines:
    """The requests of an input, which stay on disk. Numbered from 0; empty lines are none."""

    def __init__(self, path: Path) -> None:
        """Raises `InputLost`."""
        self._lock = Lock()  # a reader may still be active when it is closed
        self._open = True
        self._offsets = array("Q")
        self._sizes = array("Q")
        try:
            for _, offset, line in _lines(path, None):
                self._offsets.append(offset)
                self._sizes.append(len(line))
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise InputLost.because(error) from error

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, request: int) -> RequestLine:
        """Raises `InputLost`."""
        try:
            with self._lock:
                if not self._open:
                    raise InputLost("the input file was closed")
                data = os.pread(self._descriptor, self._sizes[request], self._offsets[request])
            return _line_decoder.decode(data)
        except OSError as error:
            raise InputLost.because(error) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputLost("the input file is not what it was when it was checked") from error

    def close(self) -> None:
        with self._lock:
            if self._open:
                os.close(self._descriptor)
            self._open = False


def check_input(
    path: Path,
    endpoint: str,
    models: frozenset[str],
    *,
    max_requests: int,
    max_line_bytes: int,
) -> int:
    """The number of requests in an input for `endpoint`, of which all name one of `models`.

    Raises `InputRefused` with all that is wrong, as far as it is listed, and `InputLost`.
    """
    try:
        return _check(path, endpoint, models, max_requests, max_line_bytes)
    except OSError as error:
        raise InputLost.because(error) from error


def _check(
    path: Path, endpoint: str, models: frozenset[str], max_requests: int, max_line_bytes: int
) -> int:
    seen: set[str] = set()
    problems: list[Problem] = []
    count = 0
    for number, _, line in _lines(path, max_line_bytes):
        count += 1
        if count > max_requests:
            message = f"the file has more than {max_requests} requests"
            problems.append(Problem(code="too_many_requests", message=message))
        else:
            found = _check_line(line, endpoint, models, seen, max_line_bytes)
            problems += [msgspec.structs.replace(problem, line=number) for problem in found]
        if len(problems) >= MAX_PROBLEMS or count > max_requests:
            break
    if not count:
        problems.append(Problem(code="empty_file", message="the file has no requests"))
    if problems:
        raise InputRefused(tuple(problems))
    return count


def _check_line(
    data: bytes, endpoint: str, models: frozenset[str], seen: set[str], max_bytes: int
) -> Iterator[Problem]:
    if len(data) > max_bytes:
        yield Problem(code="line_too_long", message=f"the line has more than {max_bytes} bytes")
        return
    try:
        line = _line_decoder.decode(data)
    except msgspec.ValidationError as error:
        yield Problem(code="invalid_request", message=str(error))
        return
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        yield Problem(code="invalid_json_line", message=f"the line is not valid JSON: {error}")
        return
    if not 0 < len(line.custom_id) <= _MAX_CUSTOM_ID:
        message = f"custom_id: 1 to {_MAX_CUSTOM_ID} characters are needed"
        yield Problem(code="invalid_custom_id", message=message, param="custom_id")
    elif line.custom_id in seen:
        message = f"custom_id: {line.custom_id!r} is the id of an earlier line"
        yield Problem(code="duplicate_custom_id", message=message, param="custom_id")
    seen.add(line.custom_id)
    if line.method != "POST":
        yield Problem(code="invalid_method", message="method: only POST", param="method")
    if line.url != endpoint:
        message = f"url: the batch is for {endpoint}, not {line.url[:200]!r}"
        yield Problem(code="invalid_url", message=message, param="url")
    try:
        model = _model_decoder.decode(line.body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        yield Problem(code="invalid_request", message=f"body: {error}", param="body")
        return
    if model not in models:
        message = f"model {model[:200]!r} does not exist"
        yield Problem(code="model_not_found", message=message, param="model")


def _lines(path: Path, longest: int | None) -> Iterator[tuple[int, int, bytes]]:
    """Number (from 1), place and bytes of every line that is not empty, without its end. Of a line
    that is longer than `longest`, a little more than that."""
    offset = number = 0
    with path.open("rb") as file:
        while line := file.readline(-1 if longest is None else longest + 2):
            number += 1
            start, offset = offset, offset + len(line)
            if longest is not None and len(line) > longest + 1 and not line.endswith(b"\n"):
                yield number, start, line
                return
            line = line.rstrip(b"\r\n")
            if line.strip():
                yield number, start, line
