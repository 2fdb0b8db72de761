"""Drop-ins beside a configuration: merged in the order of their names, each key knows its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from appliance.cli.main import cli
from appliance.config.layers import ADMIN_FILE, directory, ignored_rows
from appliance.config.loader import load_config
from appliance.errors import ConfigError, Problem
from appliance.units import Seconds

Make = Callable[..., Path]

GOOD = """\
[api]
max_queue = 7

[devices]
memory = "8MiB"
slab = "64KiB"
host_cache = "16MiB"

[[model]]
name = "tiny"
path = "tiny"
max_context = 1024
slo = { ttft = "3s", tbt = "30ms" }
"""


@pytest.fixture
def path(tmp_path: Path, fake_checkpoint: Make) -> Path:
    """A configuration beside the checkpoint `tiny`, and an empty directory of drop-ins."""
    fake_checkpoint()
    path = tmp_path / "appliance.toml"
    path.write_text(GOOD, encoding="utf-8")
    directory(path).mkdir()
    return path


def drop(path: Path, name: str, text: str) -> None:
    (directory(path) / name).write_text(text, encoding="utf-8")


def problems(path: Path) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return list(caught.value.problems)


def test_later_files_override(path: Path) -> None:
    """Key by key: what a drop-in does not say is as it was. Other files are not looked at."""
    drop(path, "10-first.toml", '[api]\nmax_queue = 8\nkeep_alive = "2s"\n')
    drop(path, "20-second.toml", "[api]\nmax_queue = 9\n")
    drop(path, "30-third.toml.bak", "[api]\nmax_queue = 10\n")

    config = load_config(path)

    assert (config.api.max_queue, config.api.keep_alive_seconds) == (9, 2)
    assert config.devices.slab_bytes == 64 << 10


def test_models_are_merged_by_name(path: Path, fake_checkpoint: Make) -> None:
    """A row changes the model of its name, down to half of a promise; another name is another
    model. Paths are relative to the main file."""
    fake_checkpoint("more")
    drop(path, "50-admin.toml", '[[model]]\nname = "tiny"\npin = true\nslo = { ttft = "1s" }\n')
    drop(path, "60-more.toml", '[[model]]\nname = "more"\npath = "more"\nmax_context = 512\n')

    tiny, more = load_config(path).models

    assert (tiny.name, tiny.pin, tiny.max_context) == ("tiny", True, 1024)
    assert (tiny.slo.ttft_seconds, tiny.slo.tbt_seconds) == (Seconds(1), Seconds(0.03))
    assert (more.name, more.path) == ("more", str(path.parent / "more"))


def test_a_policy_table_is_merged(path: Path) -> None:
    """Parameters, too; a list is replaced."""
    drop(path, "a.toml", '[policy]\nuse = ["aegaeon"]\n[policy.aegaeon]\nmax_group = 4\n')
    drop(path, "b.toml", "[policy.aegaeon]\nq_max_seconds = 2.0\n")

    policy = load_config(path).policy

    assert policy.use == ("aegaeon",)
    assert policy.parameters == {"aegaeon": {"max_group": 4, "q_max_seconds": 2.0}}


def test_problems_are_found_where_they_are(path: Path) -> None:
    """Each with its file and its line; those of the main file first."""
    path.write_text(GOOD + "dtype = 1\n", encoding="utf-8")
    drop(path, "50-admin.toml", '# mine\n[[model]]\nname = "tiny"\nmax_batch = 0\n')
    drop(path, "60-more.toml", '[api]\nbnd = "x"\n[[model]]\nname = "more"\nmax_context = 4\n')

    found = [
        (Path(problem.file).name, problem.line, problem.key, problem.wrong)
        for problem in problems(path)
    ]

    assert found == [
        ("appliance.toml", 14, "model[0].dtype", "1 is not a choice"),
        ("50-admin.toml", 4, "model[0].max_batch", "expected `int` >= 1"),
        ("60-more.toml", 2, "api.bnd", "unknown key"),
        ("60-more.toml", 3, "model[1].path", "is missing"),
    ]


@pytest.mark.parametrize(
    ("text", "wrong"), [("api = [", "not TOML"), ("model = 3\n", "expected at least one table")]
)
def test_a_drop_in_that_cannot_be_read_is_named(path: Path, text: str, wrong: str) -> None:
    """Broken syntax, or a table that is none."""
    drop(path, "50-admin.toml", text)

    (problem,) = problems(path)

    assert Path(problem.file).name == "50-admin.toml"
    assert wrong in problem.wrong


def test_what_is_pending_is_read_as_if_it_were_written(path: Path) -> None:
    """Also in place of a drop-in that is there; nothing is written."""
    drop(path, "50-admin.toml", "[api]\nmax_queue = 8\n")
    pending = {directory(path) / "50-admin.toml": "[api]\nmax_queue = 9\n"}

    assert load_config(path, pending=pending).api.max_queue == 9
    assert load_config(path).api.max_queue == 8


def test_there_need_be_no_directory(path: Path) -> None:
    """A configuration without drop-ins is read as it is."""
    directory(path).rmdir()

    assert load_config(path).api.max_queue == 7


ANOTHER = '\n[[model]]\nname = "{name}"\npath = "{path}"\nmax_context = 512\n'


def test_leftovers_of_operators_are_ignored(path: Path) -> None:
    """`appliance rm` and `appliance limit` wrote rows for models whose tables are gone: a warning
    with the place of each, in `config check` too. What they say of other models holds."""
    admin = '[[model]]\nname = "gone"\nenabled = false\n[[model]]\nname = "tiny"\nmax_queue = 3\n'
    drop(path, ADMIN_FILE, admin + '[[model]]\nname = "left"\nmax_queue = 2\n')

    (model,) = load_config(path).models
    checked = CliRunner().invoke(cli, ["config", "check", str(path)])

    file = directory(path) / ADMIN_FILE
    expected = [
        f"{file}:{line}: model {name}: ignored, as no file has this model any more; delete the "
        "table here, or put the model's own back"
        for line, name in ((1, "gone"), (7, "left"))
    ]
    assert (model.name, model.max_queue) == ("tiny", 3)
    assert ignored_rows(path) == expected
    assert checked.exit_code == 0
    assert [line for line in checked.stderr.splitlines() if "ignored" in line] == [
        f"warning: {warning}" for warning in expected
    ]


def test_places_are_right_behind_leftovers(path: Path) -> None:
    """Problems of models that come after a row that is ignored name their own lines; and a table
    in a later drop-in makes a row one that changes a model."""
    rows = '[[model]]\nname = "gone"\nenabled = false\n[[model]]\nname = "later"\nmax_queue = 4\n'
    drop(path, ADMIN_FILE, rows)
    drop(path, "60-more.toml", ANOTHER.format(name="later", path="tiny"))
    drop(path, "70-more.toml", ANOTHER.format(name="wrong", path="nowhere"))

    (problem,) = problems(path)
    assert (problem.file, problem.line) == (str(directory(path) / "70-more.toml"), 4)
    assert problem.key == "model[2].path"

    drop(path, "70-more.toml", ANOTHER.format(name="wrong", path="tiny"))
    assert [(model.name, model.max_queue) for model in load_config(path).models] == [
        ("tiny", 1024), ("later", 4), ("wrong", 1024),
    ]  # fmt: skip


def test_leftovers_only(path: Path) -> None:
    """Without a model there is nothing to serve, and a row that a person wrote is no leftover."""
    path.write_text(GOOD[: GOOD.index("[[model]]")], encoding="utf-8")
    drop(path, ADMIN_FILE, '[[model]]\nname = "gone"\nenabled = false\n')
    assert [problem.wrong for problem in problems(path)] == ["expected at least one table"]

    drop(path, ADMIN_FILE, ANOTHER.format(name="tiny", path="tiny"))
    drop(path, "20-mine.toml", '[[model]]\nname = "tiney"\nmax_queue = 3\n')
    assert {problem.key for problem in problems(path)} == {"model[0].path"}
