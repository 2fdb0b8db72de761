"""The image of a container: each step of its file is one that works here; built where that can be.

Nothing builds images on most machines: then what the steps name is checked.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from appliance.api.app import create_app
from appliance.cli.main import cli
from appliance.config.schema import Api
from appliance.platform.torchvision import FOLDER
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.serving import unserved

ROOT = Path(__file__).parents[3]
FILE = ROOT / "packaging" / "Containerfile"


def instructions() -> list[tuple[str, str]]:
    """What the file says, by instruction; continued lines are one."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [
        (kind, rest)
        for kind, _, rest in (line.partition(" ") for line in whole.split("\n"))
        if kind
    ]


def said(kind: str) -> list[str]:
    return [rest.strip() for one, rest in instructions() if one == kind]


@pytest.mark.parametrize("copied", said("COPY"))
def test_what_is_copied_is_there(copied: str) -> None:
    *sources, target = copied.split()
    assert target.startswith("/build/")
    assert all((ROOT / source).exists() for source in sources)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_only_pinned_files_are_installed(kind: str) -> None:
    """From the lists that `make` installs; nothing but the appliance itself is built."""
    runs = " ".join(said("RUN")).replace("$KIND", kind)
    lists = re.findall(r"-r ([\w/.-]+)", runs)
    assert lists[0] == f"requirements/{kind}.txt"
    assert all("--hash=sha256:" in (ROOT / name).read_text() for name in lists)
    pins = "--no-deps --require-hashes --only-binary :all:"
    assert f'pins="{pins}"' in runs
    assert f"PINNED := {pins}" in (ROOT / "Makefile").read_text()
    assert len(re.findall(r"pip install \$pins", runs)) == len(lists)
    assert f"--target /opt/appliance/{FOLDER} -r requirements/images.txt" in runs
    assert "pip install --no-deps --no-build-isolation /build" in runs


def test_it_is_python_of_the_lists_and_no_root() -> None:
    (base,) = said("FROM")
    assert base.startswith("python:3.11-")
    assert said("USER") == ["appliance"]
    assert [kind for kind, _ in instructions()].index("USER") > max(
        number for number, (kind, _) in enumerate(instructions()) if kind == "RUN"
    )


def test_the_command_is_one_of_ours() -> None:
    """It serves the configuration of the container, at the port that is exposed, and ends as a
    signal says."""
    command = json.loads(said("ENTRYPOINT")[0]) + json.loads(said("CMD")[0])
    assert command == ["appliance", "serve", "--config", "/etc/appliance/appliance.toml"]
    refused = CliRunner().invoke(cli, command[1:])
    assert refused.exit_code == 2
    assert "/etc/appliance/appliance.toml" in refused.output
    assert said("EXPOSE") == [str(Api().bind.port)]
    assert said("STOPSIGNAL") == ["SIGTERM"]


async def test_its_probe_is_answered() -> None:
    (probe,) = said("HEALTHCHECK")
    url = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", probe)
    assert url is not None
    assert int(url[1]) == Api().bind.port
    async with unserved(create_app(FakeService())) as client:  # type: ignore[arg-type]
        assert (await client.get(url[2])).status_code == 200


def test_shells_can_read_its_steps() -> None:
    for run in said("RUN"):
        done = subprocess.run(["sh", "-n", "-c", run], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert shlex.split(run)


def works(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, timeout=600).returncode == 0


@pytest.mark.thorough
def test_it_is_built_and_answers() -> None:
    """Where there is a builder: the image has the command, and says which version it is."""
    builder = next(filter(None, map(shutil.which, ("podman", "docker", "buildah"))), None)
    if builder is None or not works(builder, "info"):
        pytest.skip("no podman, docker or buildah can be used")
    if not works(builder, "pull", said("FROM")[0]):
        pytest.skip("the image that it is made from cannot be had")
    built = subprocess.run(
        [builder, "build", "-q", "-f", str(FILE), "-t", "appliance-test", str(ROOT)],
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert built.returncode == 0, built.stderr[-2000:]
    if builder.endswith("buildah"):  # it builds, and runs nothing that ends
        return
    ran = subprocess.run(
        [builder, "run", "--rm", "appliance-test", "--version"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "appliance" in ran.stdout
