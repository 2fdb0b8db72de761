"""The certificate and its key, looked at before the server needs them."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple


class TlsProblem(NamedTuple):
    """What is wrong: at which key of the configuration, and what to do about it."""

    key: str
    wrong: str
    remedy: str


def problem_with(certificate: str, key: str) -> TlsProblem | None:
    """Why these two files (PEM, the certificate with its chain) cannot be served; None if they
    can, or if neither is given."""
    if not certificate and not key:
        return None
    for name, other, given in (
        ("tls_certificate", "tls_key", certificate),
        ("tls_key", "tls_certificate", key),
    ):
        if not given:
            return TlsProblem(name, f"is missing beside {other}", "give both, or neither")
        try:
            Path(given).read_bytes()
        except OSError as error:
            return TlsProblem(name, f"{given} cannot be read: {error.strerror}", "correct the path")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except _Encrypted:
        return TlsProblem("tls_key", f"{key} is encrypted", "give the key without a passphrase")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            return TlsProblem(
                "tls_key",
                f"{key} is not the key of {certificate}",
                "give files that belong together",
            )
        return TlsProblem(
            "tls_certificate", f"{certificate} and {key} are no certificate and key",
            "give PEM files",
        )  # fmt: skip
    return None


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    raise _Encrypted
