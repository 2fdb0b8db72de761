"""Ways to spoil a request: in its JSON, in its headers, in its bytes."""

from __future__ import annotations

import json
from random import Random
from typing import Any, Final

from tests.fuzz.corpus import Seed

Headers = list[tuple[bytes, bytes]]

_LONE_SURROGATE: Final = b'"\\ud800"'
_ODD_JSON: Final = (
    *(b"null", b"true", b"-1", b"0", b"1e400", b"-0.0", b"1e-400", b"NaN", b"Infinity"),
    *(b"9" * 400, b"18446744073709551616", b"-9223372036854775809", b"1." + b"0" * 500 + b"1"),
    *(b'""', b'"\\u0000"', _LONE_SURROGATE, b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"' + b"a" * 5000),
    *(b'"' + b"x" * 20000 + b'"', b"[]", b"{}", b"[" * 3000 + b"]" * 3000, b'{"a":' * 3000),
    *(b'"\xf0\x9f\x92\xa9"', b'"\\ud83d\\ude00"', b"[null]", b'{"":null}', b"01", b"+1", b"'a'"),
    *(b'"../../etc/passwd"', b'"{{ 7*7 }}"', b'"<|assistant|>"', b'"<eos>"', b"[[[[[]]]]]"),
)
_ODD_TARGETS: Final = (
    *(b"*", b"/", b"//", b"/%00", b"/%ff%fe", b"/..%2f..%2fetc/passwd", b"/" + b"a" * 9000),
    *(
        b"http://elsewhere.example/v1/models",
        b"/v1/models?a=%00&b[]=%zz",
        b"/api/models/%2f%2f/load",
    ),
    *(b"/api/models//load", b"/v1/models/\xc3\x28", b"/api/requests/%0d%0aX:%20y", b"?x", b""),
    *(b"/api/models/a/b/c/d/pin", b"/api/policies/%F0%9F%92%A9/enable", b"/api/blobs/"),
)
_ODD_HEADERS: Final[Headers] = [
    (b"Content-Length", b"-1"),
    (b"Content-Length", b"0"),
    (b"Content-Length", b"5, 6"),
    (b"Content-Length", b"0x10"),
    (b"Content-Length", b"99999999999999999999999"),
    (b"Content-Length", b"262145"),
    (b"Transfer-Encoding", b"chunked"),
    (b"Transfer-Encoding", b"gzip, chunked"),
    (b"Transfer-Encoding", b"identity"),
    (b"Content-Type", b"multipart/form-data; boundary="),
    (b"Content-Type", b"application/x-www-form-urlencoded"),
    (b"Content-Type", b"application/json; charset=\xff"),
    (b"Content-Type", b""),
    (b"Content-Encoding", b"gzip"),
    (b"Host", b""),
    (b"Host", b"\xff\xff"),
    (b"Host", b"[::1"),
    (b"Host", b"localhost:99999999"),
    (b"Host", b"elsewhere.example"),
    (b"Origin", b"null"),
    (b"Origin", b"http://["),
    (b"Origin", b"http://elsewhere.example"),
    (b"Authorization", b"Bearer"),
    (b"Authorization", b"Bearer \xff\xfe"),
    (b"Authorization", b"Bearer " + b"k" * 5000),
    (b"Authorization", b"Basic Og=="),
    (b"x-api-key", b""),
    (b"x-slo", b"ttft=2s, tbt=50ms, gap=1s"),
    (b"x-slo", b"ttft=1e400s"),
    (b"x-slo", b"ttft=-1s"),
    (b"x-slo", b"ttft=99999999999999999999h"),
    (b"x-slo", b"\xff"),
    (b"x-request-id", b"\xff"),
    (b"x-request-id", b"i" * 4000),
    (b"Last-Event-ID", b"0"),
    (b"Last-Event-ID", b"9999999999999999999"),
    (b"Last-Event-ID", b"\xb2"),
    (b"Cookie", b"a=\xff; =; ;;"),
    (b"Accept", b"\xff/\xff"),
    (b"Expect", b"100-continue"),
    (b"Upgrade", b"websocket"),
    (b"Upgrade", b"h2c"),
    (b"Connection", b"upgrade"),
    (b"Connection", b"keep-alive"),
    (b"Range", b"bytes=0-1"),
    (b"If-None-Match", b"*"),
    (b"X-Forwarded-For", b"1.2.3.4, \xff"),
    (b"X-Forwarded-Proto", b"https, \xff"),
    (b"a" * 5000, b"b"),
    (b"bad name", b"x"),
    (b"", b""),
    (b"X-Folded", b"a\r\n b"),
    (b"X-Split", b"a\nX-Other: b"),
    (b"X-Null", b"a\x00b"),
]
_METHODS: Final = (
    *(b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"PATCH", b"TRACE", b"CONNECT"),
    *(b"X", b"get", b"PRI", b""),
)
_VERSIONS: Final = (b"HTTP/1.1",) * 8 + (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b"")


def spoil_json(rng: Random, body: bytes) -> bytes:
    """Another value, or another key, somewhere in a body; sometimes no JSON any more."""
    try:
        value = json.loads(body)
    except ValueError:
        return rng.choice(_ODD_JSON)
    marks: dict[bytes, bytes] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        mark = f"\x1b{len(marks)}\x1b"
        marks[json.dumps(mark).encode()] = rng.choice(_ODD_JSON)
        value = _with_mark(rng, value, mark)
    text = json.dumps(value).encode()
    for mark, odd in marks.items():
        text = text.replace(mark, odd)
    return text


def _with_mark(rng: Random, value: Any, mark: str) -> Any:
    """`value` with `mark` in the place of one that is in it, or beside those."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        if rng.random() < 0.1:
            return {**value, f"extra{rng.randrange(9)}": mark}
        if rng.random() < 0.05:
            return {key: item for key, item in value.items() if rng.random() < 0.7}
        key = rng.choice(sorted(value))
        return {**value, key: _with_mark(rng, value[key], mark)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        if rng.random() < 0.1:
            return value * rng.randrange(2, 200)
        index = rng.randrange(len(value))
        return [*value[:index], _with_mark(rng, value[index], mark), *value[index + 1 :]]
    return mark


def spoil_headers(rng: Random, headers: Headers) -> Headers:
    """Some more, some twice, some less; of those that are odd up to three."""
    headers = list(headers)
    for _ in range(rng.randrange(1, 4)):
        what = rng.random()
        if what < 0.5:
            headers.insert(rng.randrange(len(headers) + 1), rng.choice(_ODD_HEADERS))
        elif what < 0.65:
            name, value = rng.choice(_ODD_HEADERS)
            headers = [one for one in headers if one[0].lower() != name.lower()]
            headers.append((name, value))
        elif what < 0.8 and headers:
            headers.append(rng.choice(headers))
        elif what < 0.9 and headers:
            headers.pop(rng.randrange(len(headers)))
        else:
            headers += [(b"X-%d" % i, b"y" * rng.randrange(50)) for i in range(rng.randrange(300))]
    return headers


def chunked(rng: Random, body: bytes) -> bytes:
    """A body in chunks whose sizes may be wrong."""
    data = b""
    while body:
        size = rng.randrange(1, len(body) + 1)
        chunk, body = body[:size], body[size:]
        line = rng.choice((b"%x", b"%X", b"%x;ext=\xff", b"0%x")) % size
        data += line + b"\r\n" + chunk + b"\r\n"
    data += b"0\r\n\r\n"
    return spoil_bytes(rng, data) if rng.random() < 0.5 else data


def spoil_bytes(rng: Random, data: bytes) -> bytes:
    """Flip bits, cut, double, drop or put in something."""
    spoilt = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if not spoilt:
            break
        at, size = rng.randrange(len(spoilt)), rng.randrange(1, 40)
        what = rng.randrange(6)
        if what == 0:
            spoilt[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del spoilt[at : at + size]
        elif what == 2:
            spoilt[at:at] = spoilt[at : at + size] * rng.randrange(1, 9)
        elif what == 3:
            spoilt[at:at] = rng.randbytes(size)
        elif what == 4:
            del spoilt[at:]
        else:
            spoilt[at:at] = rng.choice((b"\r\n", b"\r\n\r\n", b"\x00", b"\n", b"\xff", b" ", b":"))
    return bytes(spoilt)


def framed(rng: Random, seed: Seed, headers: Headers) -> bytes:
    """A request that is spoilt in its JSON alone, if at all: it has to be answered."""
    body = spoil_json(rng, seed.body) if seed.body and rng.random() < 0.5 else seed.body
    lines = [
        *((b"Host", b"localhost"), (b"Content-Type", seed.content_type.encode()), *headers),
        *((b"Content-Length", str(len(body)).encode()), (b"Connection", b"close")),
    ]
    head = f"{seed.method} {seed.path} HTTP/1.1\r\n".encode()
    return head + b"".join(name + b": " + value + b"\r\n" for name, value in lines) + b"\r\n" + body


def request(rng: Random, seed: Seed, headers: Headers) -> bytes:
    """The bytes of a request that is spoilt in one way or several; seldom it is in order."""
    method, target, version = seed.method.encode(), seed.path.encode(), b"HTTP/1.1"
    body = seed.body
    if body and rng.random() < 0.5:
        body = spoil_json(rng, body)
    if rng.random() < 0.1:
        body = spoil_bytes(rng, body)
    if rng.random() < 0.05:
        method = rng.choice(_METHODS)
    if rng.random() < 0.05:
        target = rng.choice(_ODD_TARGETS)
    elif rng.random() < 0.05:
        target = spoil_bytes(rng, target)
    if rng.random() < 0.05:
        version = rng.choice(_VERSIONS)
    kind = seed.content_type.encode()
    headers = [(b"Host", b"localhost"), (b"Content-Type", kind), *headers]
    if rng.random() < 0.1:
        headers.append((b"Transfer-Encoding", b"chunked"))
        data = chunked(rng, body)
    else:
        headers.append((b"Content-Length", str(len(body)).encode()))
        data = body
    if rng.random() < 0.8:
        headers.append((b"Connection", b"close"))
    if rng.random() < 0.3:
        headers = spoil_headers(rng, headers)
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    raw = method + b" " + target + b" " + version + b"\r\n" + lines + b"\r\n" + data
    return spoil_bytes(rng, raw) if rng.random() < 0.15 else raw
