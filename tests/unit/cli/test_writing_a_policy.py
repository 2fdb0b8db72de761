"""docs/writing-a-policy.md is true: its commands run, its changes work, its package installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docblocks import code_blocks
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "writing-a-policy.md").read_text(encoding="utf-8")

LIST = """from appliance.policies.loader import installed
for policy in installed():
    print(policy.name, policy.distribution, policy.version, policy.error or policy.about)"""
"""What `appliance policy list` shows, without a daemon."""

MINE = "mine appliance-policy-mine 0.1.0 Mine: the most urgent first, a turn for every model."


SHELL = [block.text for block in code_blocks("docs/writing-a-policy.md", "sh")]
CODE = [block.text for block in code_blocks("docs/writing-a-policy.md", "python")]
FILES = {
    "little.toml": code_blocks("docs/writing-a-policy.md", "toml"),
    "lengths.csv": code_blocks("docs/writing-a-policy.md", "csv"),
}
"""Files that the page has the reader write."""


class Reader:
    """Does as the page says, in a folder; what pip installs goes to another one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self.installed = folder / "installed"
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = os.environ | {
            "PATH": path,
            "PYTHONPATH": os.pathsep.join([str(self.installed), str(ROOT)]),
            "PIP_TARGET": str(self.installed),
            "PIP_NO_INDEX": "1",
        }

    def type(self, commands: str, status: int = 0) -> str:
        """Run commands in a shell; returns what they print."""
        result = subprocess.run(
            ["bash", "-ec", commands],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert result.returncode == status, result.stdout
        return result.stdout

    def edit(self, name: str, beginning: str, replacement: str) -> None:
        """Replace the end of a file, from the line that begins so."""
        path = self.folder / name
        kept, _, _ = path.read_text(encoding="utf-8").partition(beginning)
        path.write_text(kept + replacement, encoding="utf-8")


@pytest.mark.thorough
def test_from_nothing_to_an_installed_policy(tmp_path: Path) -> None:
    """Every step of the page, up to those that need a running daemon; then it is removed again."""
    reader = Reader(tmp_path)
    make, check, tests, install, compare = SHELL
    own_round, own_test, state, own_order = CODE

    assert "mine/appliance_mine.py" in reader.type(make)
    reader.folder /= "mine"
    assert "Mine: nothing to object to" in reader.type(check)

    reader.edit("appliance_mine.py", "        return [\n            PlannedTurn(", own_round)
    reader.edit("test_mine.py", "    assert all(", own_test)
    reader.type(tests)

    reader.edit("appliance_mine.py", "        runnable.sort(", own_order)
    module = reader.folder / "appliance_mine.py"
    first_hook = "    @hookimpl\n    def admit"
    text = module.read_text(encoding="utf-8").replace(first_hook, f"{state}\n{first_hook}")
    module.write_text(
        text.replace("import msgspec\n", "from collections import Counter\n\nimport msgspec\n", 1),
        encoding="utf-8",
    )
    reader.type("ruff check --select F .")
    reader.edit(
        "test_mine.py",
        "    assert all(",
        "    assert len(turns) == len({turn.model for turn in turns})\n",
    )
    reader.type(tests)

    assert "mine" not in reader.type(f"python -c '{LIST}'")
    assert "mine (appliance-policy-mine 0.1.0)" in reader.type(install)
    assert MINE in reader.type(f"python -c '{LIST}'")

    for name, (content,) in FILES.items():
        (reader.folder / name).write_text(content.text, encoding="utf-8")
    compared = reader.type(compare)
    assert re.search(r"^ *mine ", compared, re.MULTILINE), compared
    assert re.search(r"^ *appliance ", compared, re.MULTILINE), compared

    reader.folder = tmp_path  # what was built beside the source counts as installed there
    assert MINE in reader.type(f"python -c '{LIST}'")
    shutil.rmtree(reader.installed)
    assert "mine" not in reader.type(f"python -c '{LIST}'")
    assert "no installed policy" in reader.type("appliance policy test mine", status=2)


def test_the_package_s_own_test_fails_when_turns_differ(tmp_path: Path) -> None:
    """As the page says that it should."""
    reader = Reader(tmp_path)
    make, _, tests, *_ = SHELL
    reader.type(make)
    reader.folder /= "mine"

    reader.edit("appliance_mine.py", "        return [\n            PlannedTurn(", CODE[0])

    assert "failed" in reader.type(f"{tests} -k as_long", status=1)


def test_every_check_is_explained() -> None:
    """The table of the page has those that the kit makes, and no other."""
    source = (ROOT / "appliance" / "testing" / "kit.py").read_text(encoding="utf-8")
    made = set(re.findall(r'_find\("(\w+)"', source)) | {"exceptions", "answers"}

    explained = set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE))

    assert explained == made


def test_every_link_leads_to_a_file() -> None:
    """Those of pages that are there already."""
    links = re.findall(r"\]\(([\w./-]+)\)", TEXT)

    assert "hooks.md" in links
    for link in links:
        assert (ROOT / "docs" / link).exists(), link
