"""``python -m appliance``, and the console script ``appliance``."""

from __future__ import annotations

from appliance.cli.main import cli


def main() -> None:
    """Run the command line; exits with its status."""
    cli(prog_name="appliance")


if __name__ == "__main__":
    main()
