"""`appliance serve` and `appliance init`: a daemon from a configuration, or from directories, and
the configuration that such a daemon would have."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

import click

from appliance.checkpoints.discovery.find import NotFound, find_models
from appliance.checkpoints.pull import NAME
from appliance.checkpoints.sources import HUB
from appliance.cli.options import config_help, default_config, load_or_exit
from appliance.cli.start.folders import models_folder
from appliance.client import fail
from appliance.config.schema import Config
from appliance.config.starter import BIND, Starter, Terms, commented_text, write_starter
from appliance.errors import ApplianceError, ConfigError
from appliance.platform.durable import replace
from appliance.units import Address

FILE_NAME: Final = "appliance.toml"
_TOML: Final = ".toml"


def _named(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, Path]:
    """Directories by the names of their models, from ``NAME=DIR`` each."""
    found: dict[str, Path] = {}
    for value in values:
        name, separator, path = value.partition("=")
        if not separator or not path:
            raise click.BadParameter(f"{value!r} is not NAME=DIR, such as llama=/srv/models/llama")
        if not NAME.fullmatch(name):
            wrong = f"{name!r} cannot be a model's name: use letters, digits and any of ._:/-"
            raise click.BadParameter(wrong)
        if name in found:
            raise click.BadParameter(f"{name} is given twice: give each model a name of its own")
        found[name] = Path(path)
    return found


def _address(_: click.Context, __: click.Parameter, value: str | None) -> Address | None:
    """``HOST:PORT``, on which no other machine can connect: directories come without keys."""
    if value is None:
        return None
    try:
        address = Address.read(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if not address.local:
        raise click.BadParameter(
            f"{value} can be reached from outside this machine, and there are no keys: write a "
            "configuration with `appliance init`, and set bind and keys in it"
        )
    return address


model_option = click.option(
    "--model", "named", metavar="NAME=DIR", callback=_named, multiple=True,
    help="The checkpoint in DIR, served as NAME; repeat it for others.",
)  # fmt: skip
bind_option = click.option(
    "--bind", callback=_address, metavar="HOST:PORT",
    help=f"Where to listen, on this machine. [default: {BIND}]",
)  # fmt: skip


@click.command()
@click.argument("places", metavar="[FILE|DIR]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--config", type=click.Path(dir_okay=False, path_type=Path), help=config_help())
@model_option
@bind_option
def serve(
    places: tuple[Path, ...],
    config: Path | None,
    named: dict[str, Path],
    bind: Address | None,
) -> None:
    """Run the daemon in the foreground: with the configuration FILE, or with all checkpoints in
    the directories DIR and no configuration.

    A DIR is a checkpoint, or has some in it: DIR/MODEL, DIR/ORG/MODEL, the cache of
    huggingface_hub, the folder of `appliance pull`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the daemon runs, as SIGTERM is
    file = _file(places, config)
    if file is None and (places or named):
        _serve_directories(places, named, bind or BIND)
    if named or bind:
        raise click.UsageError("--model and --bind are for directories; a FILE says both itself")
    file = file or default_config()
    if not os.path.exists(file):  # noqa: PTH110
        click.echo("there is no configuration; without one: appliance serve DIR", err=True)
    _run(load_or_exit(file, now=True), file)


@click.command()
@click.argument(
    "directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path)
)  # fmt: skip
@click.option(
    "--output", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    default=Path(FILE_NAME), show_default=True, help="File to write; - for standard output.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
@model_option
@bind_option
def init(
    directories: tuple[Path, ...],
    output: Path,
    force: bool,
    named: dict[str, Path],
    bind: Address | None,
) -> None:
    """Write a configuration for this machine and the checkpoints in DIR (default: the working
    directory), with comments. It says what `appliance serve DIR` would do."""
    printed = str(output) == "-"
    if not printed and os.path.exists(output) and not force:  # noqa: PTH110
        _is_there(output)
    with _scratch("appliance-init-") as scratch:
        places = directories or (() if named else (Path(),))
        terms = _terms(bind or BIND)
        starter = _starter(Path(scratch, FILE_NAME), places, named, terms)
    text = commented_text(starter, terms, FILE_NAME if printed else str(output))
    for one in starter.left_out:
        click.echo(str(one), err=True)
    if printed:
        click.echo(text, nl=False)
        return
    try:
        _write(output, text, force=force)
    except FileExistsError:
        _is_there(output)
    except OSError as error:
        fail(f"{output} cannot be written ({error.strerror})")
    names = ", ".join(model.name for model in starter.models)
    click.echo(f"{output} has {names}; run it with: appliance serve {output}")


def _is_there(output: Path) -> NoReturn:
    fail(f"{output} is there already; replace it with --force, or give another --output", 2)


def _write(output: Path, text: str, *, force: bool) -> None:
    """A file that is there is replaced as a whole, or not at all. Raises `OSError`."""
    if force and output.is_file():
        mode = stat.S_IMODE(output.stat().st_mode)
        replace(output.resolve(), [text.encode()], lambda file: os.fchmod(file, mode))
        return
    with output.open("w" if force else "x", encoding="utf-8") as file:
        file.write(text)


def _file(places: Sequence[Path], config: Path | None) -> Path | None:
    """The configuration that was given, if one was."""
    if config is not None:
        if places:
            raise click.UsageError("give FILE or --config FILE, not both, and no directory with it")
        return config
    files = [place for place in places if place.suffix == _TOML or os.path.isfile(place)]  # noqa: PTH113
    if not files or files[0].suffix == ".gguf":
        return None
    if len(places) > 1:
        raise click.UsageError(f"give one FILE, or directories: {files[0]} is a file")
    return files[0]


def _serve_directories(places: Sequence[Path], named: Mapping[str, Path], bind: Address) -> None:
    """Ends the command when the daemon ends. The configuration is in a folder of its own until
    then, with what operators change."""
    with _scratch("appliance-serve-") as scratch, _kept(scratch):
        file = Path(scratch, FILE_NAME)
        starter = _starter(file, places, named, _terms(bind), now=True)
        notes = [str(one) for one in starter.left_out]
        _run(starter.config, file, notes)


@contextmanager
def _scratch(prefix: str) -> Iterator[str]:
    """A folder of temporary files. It is deleted also when a signal ends the process, until the
    daemon has handlers of its own."""
    owner = os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        ending = [one for one in _ENDING if signal.getsignal(one) is signal.SIG_DFL]
        for number in ending:
            signal.signal(number, end)
        try:
            yield folder
        finally:
            for number in ending:
                if signal.getsignal(number) is end:
                    signal.signal(number, signal.SIG_DFL)


_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _kept(folder: str) -> Iterator[None]:
    """The system deletes old folders of temporary files, but for those that are locked."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_SH)
        yield
    finally:
        os.close(held)


def _terms(bind: Address) -> Terms:
    try:
        return Terms(bind, models_folder())
    except ApplianceError as error:
        fail(str(error))


def _starter(
    file: Path,
    places: Sequence[Path],
    named: Mapping[str, Path],
    terms: Terms,
    *,
    now: bool = False,
) -> Starter:
    """For the memory that is available `now`, or for all that there is. Ends the command if nothing
    can be served."""
    try:
        return write_starter(file, find_models(places, named), terms, now=now)
    except NotFound as error:
        fail(f"{error}{_advice(places)}", 2)
    except ConfigError as error:
        fail("\n".join(f"{one.key}: {one.wrong}; {one.remedy}" for one in error.problems), 2)
    except (ApplianceError, OSError) as error:
        fail(str(error))


def _advice(places: Sequence[Path]) -> str:
    """What to do about a name that is a hub's model and no directory."""
    for place in places:
        if HUB.fullmatch(str(place)) and not os.path.exists(place.parent):  # noqa: PTH110
            return f"; for a model of a hub: appliance run {place}"
    return ""


def _run(config: Config, path: Path, notes: Sequence[str] = ()) -> None:
    """Ends the command when the daemon ends. `notes` are the first lines of its log."""
    from appliance.serve import serve as run_daemon  # loads the API; others need it not

    try:
        status = run_daemon(config, path, notes) if notes else run_daemon(config, path)
    except (ApplianceError, OSError) as error:
        fail(str(error))
    sys.exit(status)
