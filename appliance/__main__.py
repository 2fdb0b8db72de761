"""``python -m appliance``, and the console script ``appliance``."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line; exits with its status. An interrupt that comes while the modules are
    loaded ends it as a signal does, without a traceback."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from appliance.cli.main import cli

    signal.signal(signal.SIGINT, usual)
    cli(prog_name="appliance")


if __name__ == "__main__":
    main()
