"""Parsers of configured models: wrong names are refused, and what `auto` stands for is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from appliance.cli.main import cli
from appliance.config.loader import load_config
from appliance.config.sizing import read_model
from appliance.daemon.served_model import served_model
from appliance.errors import ConfigError
from tests.docblocks import code_blocks
from tests.docshell import examples

Make = Callable[..., Any]
TEMPLATE = (
    '{% if tools %}{{ tools }}{{ \'<tool_call>{"name": "f", "arguments": {}}</tool_call>\' }}'
    "{% endif %}<think>"
)


@pytest.fixture
def configured(tmp_path: Path, fake_checkpoint: Make) -> Callable[..., Path]:
    """A configuration of one model, with these lines in its table."""

    def write(lines: str = "", template: str = TEMPLATE) -> Path:
        fake_checkpoint()
        folder = tmp_path / "tiny"
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": template}), encoding="utf-8"
        )
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(
            json.dumps(config | {"model_type": "llama"}), encoding="utf-8"
        )
        file = tmp_path / "appliance.toml"
        file.write_text(
            '[devices]\nmemory = "8MiB"\n[[model]]\nname = "tiny"\npath = "tiny"\n'
            f'max_context = 64\ndtype = "float32"\n{lines}\n',
            encoding="utf-8",
        )
        return file

    return write


@pytest.mark.parametrize("check_files", [True, False])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('tool_parser = "hermez"', "tool_parser: 'hermez' is not one of vLLM's parsers of tool "),
        ('tool_parser = "hermez"', "did you mean hermes?"),
        ('tool_parser = "Auto"', "did you mean auto?"),
        ('reasoning_parser = "deepseek-r1"', "did you mean deepseek_r1?"),
        ('reasoning_parser = "hermes"', "reasoning_parser: 'hermes' is not one of vLLM's parsers"),
        ('tool_parser = "xyzzy"', "docs/structured-outputs.md#parsers lists all of them"),
    ],
)
def test_a_name_that_vllm_does_not_know_is_refused(
    configured: Callable[..., Path], line: str, said: str, check_files: bool
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(configured(line), check_files=check_files)
    (problem,) = refused.value.problems
    assert said in str(problem)
    assert problem.line == 8


@pytest.mark.parametrize("name", ["", "auto", "hermes", "qwen3_xml"])
def test_names_of_vllms_are_taken(configured: Callable[..., Path], name: str) -> None:
    (model,) = load_config(configured(f'tool_parser = "{name}"')).models
    assert model.tool_parser == name


@pytest.mark.parametrize(
    ("lines", "template", "tools", "reasoning"),
    [
        ("", TEMPLATE, "hermes", None),
        ('tool_parser = ""', TEMPLATE, None, None),
        ("", "{{ messages }}", None, None),
        ('reasoning_parser = "qwen3"', "{{ messages }}", None, "qwen3"),
    ],
)
def test_front_ends_and_workers_get_what_was_chosen(
    configured: Callable[..., Path],
    lines: str,
    template: str,
    tools: str | None,
    reasoning: str | None,
) -> None:
    config = load_config(configured(lines, template))
    (model,) = config.models
    served = served_model(model, read_model(model, config.devices))
    assert (served.front.tool_parser, served.front.reasoning_parser) == (tools, reasoning)
    assert served.worker.reasoning_parser == (reasoning or "")
    assert served.facts.tool_parser == (tools or "")
    assert served.facts.reasoning_parser == (reasoning or "")


def test_config_check_says_which_parser_and_why(configured: Callable[..., Path]) -> None:
    reason = "model type llama, and <tool_call> in the chat template"
    file = configured()
    shown = CliRunner().invoke(cli, ["config", "check", str(file)])
    assert f'tiny: tool_parser = "hermes": {reason}\n' in shown.output
    assert "reasoning_parser" not in shown.output

    (entry,) = json.loads(CliRunner().invoke(cli, ["config", "check", "--json", str(file)]).stdout)
    assert (entry["tool_parser"], entry["tool_parser_reason"]) == ("hermes", reason)
    assert (entry["reasoning_parser"], entry["reasoning_parser_reason"]) == ("", "")


def test_config_check_says_what_the_document_shows(
    tmp_path: Path, fake_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/structured-outputs.md: the last line, of a model of the name and type that it has."""
    (block,) = code_blocks("docs/structured-outputs.md", "console")
    ((command, shown),) = examples(block.text)
    path = fake_checkpoint("m", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "appliance.toml").write_text(
        '[devices]\nmemory = "64MiB"\nhost_cache = "64MiB"\n'
        '[[model]]\nname = "qwen3-a"\npath = "m"\nmax_context = 64\n'
    )
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(cli, command.split()[1:])

    assert result.exit_code == 0, result.output
    assert shown[-1] in result.output.splitlines()


def test_config_check_says_why_there_is_none(configured: Callable[..., Path]) -> None:
    file = configured('reasoning_parser = "auto"', "{{ messages }}")
    shown = CliRunner().invoke(cli, ["config", "check", str(file)]).output
    assert 'tiny: tool_parser = "": the chat template does not read tools\n' in shown
    assert (
        'tiny: reasoning_parser = "": no parser is known for the chat template of a llama model\n'
        in shown
    )
