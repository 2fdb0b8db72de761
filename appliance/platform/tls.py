"""The certificate and its key: looked at before they are served, and renewed while they are."""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path
from typing import Final, NamedTuple

MISMATCHES: Final = ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""What OpenSSL says of the key of another certificate: of the same kind of key, and of another."""


class TlsProblem(NamedTuple):
    """What is wrong: at which key of the configuration, and what to do about it."""

    key: str
    wrong: str
    remedy: str


class Pair(NamedTuple):
    """A certificate and its key, as they were read. `digest` is the SHA-256 of the certificate's
    file in hexadecimal: it tells pairs apart, as no other key belongs to the same certificate."""

    context: ssl.SSLContext
    digest: str


def problem_with(certificate: str, key: str) -> TlsProblem | None:
    """Why these two files (PEM, the certificate with its chain) cannot be served; None if they
    can, or if neither is given."""
    if not certificate and not key:
        return None
    found = read_pair(certificate, key)
    return found if isinstance(found, TlsProblem) else None


def read_pair(certificate: str, key: str) -> Pair | TlsProblem:
    """These two files, or why they cannot be served."""
    contents = {}
    for name, other, given in (
        ("tls_certificate", "tls_key", certificate),
        ("tls_key", "tls_certificate", key),
    ):
        if not given:
            return TlsProblem(name, f"is missing, but {other} is set", "give both, or neither")
        try:
            contents[name] = Path(given).read_bytes()
        except OSError as error:
            return TlsProblem(name, f"{given} cannot be read: {error.strerror}", "correct the path")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # It reads the files again. Those that change in between are newer than their digest says,
        # and are read once more at the next reload; the other way round they would be missed.
        context.load_cert_chain(certificate, key, _no_password)
    except _Encrypted:
        return TlsProblem("tls_key", f"{key} is encrypted", "give the key without a passphrase")
    except OSError as error:
        if isinstance(error, ssl.SSLError) and error.reason in MISMATCHES:
            return TlsProblem(
                "tls_key",
                f"{key} is not the key of {certificate}",
                "give files that belong together",
            )
        return TlsProblem(
            "tls_certificate", f"{certificate} and {key} are no certificate and key",
            "give PEM files",
        )  # fmt: skip
    return Pair(context, hashlib.sha256(contents["tls_certificate"]).hexdigest())


class LiveTls:
    """TLS of a server that serves: `pair` is what handshakes that begin from now on are made with.
    Connections keep the one that they were made with.

    `context`, for the listener, has no certificate itself. Loading another pair into one that has
    would leave a certificate of another kind of key in force next to the new one, and a pair that
    fails half-way would leave none.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.sni_callback = self._choose  # called without a name of the server, too

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self.pair.context


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    raise _Encrypted
