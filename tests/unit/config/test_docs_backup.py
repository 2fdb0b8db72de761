"""docs/backup.md names the files that the code writes, and every path of a configuration."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from appliance.batches.log import ENTRIES
from appliance.batches.store import store_in
from appliance.config.admin_file import AdminFile
from appliance.config.checked_text import write_text
from appliance.daemon.autopilot.barred_file import barred_path
from appliance.daemon.autopilot.seasons_file import seasons_path
from appliance.memory.ceilings.stored import NAME, SYSTEM_DIRECTORY
from appliance.memory.kv_files import LOCK
from appliance.memory.kv_files import SUFFIX as KV
from appliance.memory.weight_cache.image_file import SUFFIX as PACKED
from appliance.platform.checked_file import copy_of
from appliance.platform.database import SET_ASIDE
from tests.prose import ROOT

PAGE = (ROOT / "docs" / "backup.md").read_text(encoding="utf-8")
CODE = " ".join(re.findall(r"`([^`]+)`", PAGE))
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
CONFIG = Path("/etc/appliance/appliance.toml")


@pytest.mark.parametrize(
    "name",
    [
        str(CONFIG),
        f"{AdminFile(CONFIG).path.parent}/",
        AdminFile(CONFIG).path.name,
        copy_of(AdminFile(CONFIG).path).name,
        f"{SYSTEM_DIRECTORY}/keys.json",
        copy_of(Path("keys.json")).name,
        SET_ASIDE,
        f"*{ENTRIES}",
        f"*{PACKED}",
        f"*{KV}",
        LOCK,
        NAME,
        str(barred_path("")),
        str(seasons_path("")),
        ".origin",
        ".previous",
    ],
)
def test_what_the_code_writes_is_named(name: str) -> None:
    assert name in CODE


def test_the_database_of_batches_is_named(tmp_path: Path) -> None:
    """All that is in a new folder."""
    database = store_in(tmp_path)
    database.open()
    database.close()
    files = [path.name for path in tmp_path.iterdir()]

    assert len(files) > 1
    assert [name for name in files if name not in CODE] == []


def test_what_operators_change_is_two_files(tmp_path: Path) -> None:
    admin = AdminFile(tmp_path / CONFIG.name).path
    admin.parent.mkdir()
    write_text(admin, "", 0o644)

    assert sorted(path.name for path in admin.parent.iterdir()) == [
        admin.name,
        f"{admin.name}.copy",
    ]


def test_every_path_of_a_configuration_is_named() -> None:
    """Those that docs/configuration.md says are relative to the file."""
    section, keys = "", []
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        if heading := re.match(r"#+ `\[*(\w+)\]*`", line):
            section = heading[1]
        elif (row := re.match(r"\| `(\w+)` \|", line)) and "elative to this" in line:
            inner = section in ("model", "adapter", "kv_spill", "speculate")
            keys.append(
                section if section == "kv_spill" else row[1] if inner else f"{section}.{row[1]}"
            )

    assert len(keys) > 8
    assert [key for key in keys if key not in CODE] == []


@pytest.mark.parametrize("block", BLOCKS)
def test_the_commands_are_commands(block: str) -> None:
    """A shell reads them; they want a whole machine, so none is run."""
    done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=False)

    assert done.stderr == ""
    assert "appliance" in block
