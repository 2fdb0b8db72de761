"""`appliance top --web`: where the dashboard is served to browsers, and what is said of it."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Callable
from typing import Any, NamedTuple

import click

from appliance.client import check_address, fail, own_key
from appliance.platform.tls import problem_with
from appliance.units import Address

DEFAULT_BIND = "127.0.0.1:11501"
EVERYWHERE = ("0.0.0.0", "::")

file = click.Path(dir_okay=False, exists=True)


class Web(NamedTuple):
    """Where to listen; the files are for HTTPS, both or none."""

    bind: Address
    certificate: str = ""
    key: str = ""

    @property
    def address(self) -> str:
        """As a browser needs it; a port that the system chooses is not known yet."""
        host = self.bind.host
        shown = socket.gethostname() if host in EVERYWHERE else host
        return (
            f"{'https' if self.certificate else 'http'}://{f'[{shown}]' if ':' in shown else shown}"
        )

    def serve(self, url: str, *, readonly: bool, theme: str) -> None:
        """Until a signal ends it. Ends the command for what cannot be."""
        try:  # an HTTP server, and Textual: an extra
            from tui.web.server import CannotListen, Site, serve
        except ModuleNotFoundError as error:
            fail(f"--web needs {error.name}: install appliance[web]")
        check_address(url)
        if not self.bind.local and not self.certificate:
            click.echo(
                f"warning: {self.bind} can be reached from outside this machine, and without TLS "
                "keys and pages can be read on the way; see --tls-certificate",
                err=True,
            )
        address = self.address

        def opened(port: int) -> None:
            nonlocal address
            address = f"{address}:{port}/"
            click.echo(f"the dashboard is at {address}")

        def announce(link: str) -> None:
            click.echo(f"this lets one browser in, with your rights: {address}{link}")

        site = Site(
            url, own_key=own_key(), local=self.bind.local,
            encrypted=bool(self.certificate), readonly=readonly, theme=theme, announce=announce,
        )  # fmt: skip
        try:
            asyncio.run(serve(site, self.bind.host, self.bind.port, self._tls(), opened))
        except CannotListen as error:
            fail(f"--bind: {self.bind}: {error}")
        except OSError as error:
            fail(f"--web: {error.strerror or error}")

    def _tls(self) -> ssl.SSLContext | None:
        if not self.certificate:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.certificate, self.key)
        return context


def web_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--web` and what goes with it; the command is given `web`, a `Web` or None."""

    @click.option("--web", is_flag=True, help="Serve it to browsers, behind an admin key.")
    @click.option(
        "--bind", metavar="HOST:PORT", help=f"Where --web listens.  [default: {DEFAULT_BIND}]"
    )
    @click.option("--tls-certificate", type=file, help="PEM, with the chain: --web is HTTPS.")
    @click.option("--tls-key", type=file, help="PEM, without a passphrase.")
    @functools.wraps(command)
    def with_web(
        *arguments: Any,
        web: bool,
        bind: str | None,
        tls_certificate: str | None,
        tls_key: str | None,
        **others: Any,
    ) -> Any:
        found = _read(bind, tls_certificate or "", tls_key or "") if web else None
        if not web and (bind or tls_certificate or tls_key):
            raise click.UsageError("--bind, --tls-certificate and --tls-key are for --web")
        return command(*arguments, web=found, **others)

    return with_web


def _read(bind: str | None, certificate: str, key: str) -> Web:
    try:
        address = Address.read(bind or DEFAULT_BIND)
    except ValueError as error:
        raise click.UsageError(f"--bind: {error}") from error
    if problem := problem_with(certificate, key):
        option = f"--{problem.key.replace('_', '-')}"
        raise click.UsageError(f"{option}: {problem.wrong}: {problem.remedy}")
    return Web(address, certificate, key)
