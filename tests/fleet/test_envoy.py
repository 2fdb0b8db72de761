"""Envoy takes the configuration in packaging/llm-d, as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "packaging" / "llm-d" / "envoy.yaml"
ENVOY = Path(sys.executable).with_name("envoy")


def validated(configuration: Path) -> subprocess.CompletedProcess[str]:
    command = [ENVOY, "--mode", "validate", "-c", configuration]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_configuration_is_valid() -> None:
    done = validated(CONFIGURATION)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("OK")


def test_a_field_that_envoy_does_not_know_is_seen(tmp_path: Path) -> None:
    """So the test above can fail."""
    text = CONFIGURATION.read_text(encoding="utf-8")
    wrong = tmp_path / "envoy.yaml"
    wrong.write_text(text.replace("http_header_name:", "http_header_nam:"), encoding="utf-8")
    done = validated(wrong)
    assert done.returncode != 0
    assert "http_header_nam" in done.stderr
