"""Children that run our modules: nothing in the working directory runs in their place."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import appliance
from appliance.platform.children import (
    FRONT_END_OOM_SCORE,
    WORKER_OOM_SCORE,
    module_command,
    without_secrets,
)
from tests.patience import PATIENCE_SECONDS

STARTED = (
    "appliance.worker",
    "appliance.worker.follower",
    "appliance.worker.zygote",
    "appliance.frontend.zygote",
    "appliance.memory.weight_cache.image_writer",
)
ELSEWHERE = {"demo/run.py", "fleet/ray_serve/node.py", "testing/rerun.py"}
"""Name the interpreter in a line for a person to type, run Ray's own command, and start a policy
author's own module."""


def says(command: Sequence[str], folder: Path) -> str:
    """What a command says that is started there, and ends for lack of arguments."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with a module of a name that all of ours import."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit('planted')\n")
    return tmp_path


@pytest.mark.parametrize("module", STARTED)
def test_a_module_in_the_working_directory_is_not_run(module: str, planted: Path) -> None:
    """It is by `python -m`."""
    assert "planted" in says((sys.executable, "-m", module), planted)
    assert "planted" not in says(module_command(module), planted)


def test_children_go_first_when_memory_runs_out() -> None:
    """Workers before front ends; a score that is higher already stays."""
    program = (
        "from pathlib import Path; from appliance.platform.children import *;"
        "score = Path('/proc/self/oom_score_adj'); first = int(score.read_text());"
        "go_before_the_daemon({}); go_before_the_daemon(-1000);"
        "print(first, score.read_text())"
    )
    scores = []
    for wanted in (FRONT_END_OOM_SCORE, WORKER_OOM_SCORE):
        command = (sys.executable, "-c", program.format(wanted))
        first, raised = map(int, subprocess.check_output(command).split())
        assert raised == max(first, wanted)
        scores.append(raised)

    assert scores[0] <= scores[1]


def test_every_child_is_started_so() -> None:
    """No other file of ours names the interpreter."""
    root = Path(appliance.__file__).parent
    naming = {
        file.relative_to(root).as_posix()
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
    }

    assert naming == {"platform/children.py", *ELSEWHERE}


def test_secrets_are_the_daemons_alone() -> None:
    """By their names; what children need is passed on."""
    secrets = {
        *(
            "HF_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "OPENAI_API_KEY",
            "APPLIANCE_API_KEY",
            "DB_PASSWORD",
        ),
        *("GOOGLE_APPLICATION_CREDENTIALS", "token", "SSH_PRIVATE_KEY", "HUGGING_FACE_HUB_TOKEN"),
        *("PGPASSWORD", "MYSQL_PWD", "GPG_PASSPHRASE", "SMTP_PASSWD_FILE"),
    }
    needed = {
        *("PATH", "HOME", "LD_PRELOAD", "VLLM_CPU_KVCACHE_SPACE", "TOKENIZERS_PARALLELISM"),
        *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "KEYBOARD", "PYTHONPATH", "XDG_CACHE_HOME"),
        *("PWD", "OLDPWD"),
    }
    assert without_secrets(dict.fromkeys(secrets | needed, "x")).keys() == needed


def test_urls_with_passwords_are_the_daemons_alone() -> None:
    """Whatever the variable is called."""
    secrets = {
        "https_proxy": "http://user:secret@proxy:3128",
        "DATABASE_URL": "postgres://user:p%40ss@db/x",
    }
    needed = {
        "http_proxy": "http://proxy:3128",
        "no_proxy": "localhost,::1",
        "TIMES": "http://docs/10:30@noon",
    }
    assert without_secrets(secrets | needed) == needed


def test_no_privileges_are_gained() -> None:
    """Nor by what is forked later."""
    program = (
        "import os; from pathlib import Path; from appliance.platform.children import *\n"
        "forbid_new_privileges()\n"
        "child = os.fork()\n"
        "forbidden = 'NoNewPrivs:\\t1' in Path('/proc/self/status').read_text()\n"
        "if not child: os._exit(10 + forbidden)\n"
        "_, status = os.waitpid(child, 0)\n"
        "print(forbidden, os.waitstatus_to_exitcode(status))"
    )
    done = subprocess.run(
        (sys.executable, "-c", program), capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["True", "11"], done.stderr


def test_a_process_dies_with_the_writer_of_a_pipe() -> None:
    """Whatever it does, and though that is not its parent; at once if the writer has gone."""
    program = (
        "import os, sys\n"
        "from appliance.platform.children import die_with_writer\n"
        "die_with_writer(int(sys.argv[1]))\n"
        "print('begun', flush=True)\n"
        "while True: pass\n"
    )
    for gone in (False, True):
        reader, writer = os.pipe()
        if gone:
            os.close(writer)
        command = (sys.executable, "-c", program, str(reader))
        with subprocess.Popen(command, pass_fds=(reader,), stdout=subprocess.PIPE) as process:
            os.close(reader)
            assert process.stdout is not None
            assert process.stdout.readline() == (b"" if gone else b"begun\n")
            if not gone:
                os.close(writer)
            assert process.wait(PATIENCE_SECONDS) == -signal.SIGKILL


def test_a_process_is_named() -> None:
    """As `ps -o comm` shows it, however it was started."""
    program = (
        "from pathlib import Path; from appliance.platform.children import name_process;"
        "name_process('appliance-w12'); print(Path('/proc/self/comm').read_text(), end='')"
    )

    assert says((sys.executable, "-c", program), Path.cwd()) == "appliance-w12\n"
