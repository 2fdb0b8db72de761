"""A configuration is read whole or refused with every problem, its line and its remedy."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.access.keys import Key, KeyFile
from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.cli.docs import config as configdoc
from appliance.config.checks import warnings
from appliance.config.loader import load_config
from appliance.config.schema import BatchSlo, Config, PolicyTable, SloTable, fields, schema
from appliance.config.sizing import uncached
from appliance.errors import ConfigError, Problem
from appliance.hookspecs import HOOKS
from appliance.platform.checked_file import copy_of
from appliance.service.policy_report import PolicyChoice
from appliance.units import Delay, Seconds

ROOT = Path(__file__).parents[3]
Make = Callable[..., Path]

GOOD = """\
[devices]
memory = "8MiB"
slab = "64KiB"
host_cache = "16MiB"

[[model]]
name = "tiny"
path = "tiny"
max_context = 1024
dtype = "float32"
"""


def write(directory: Path, text: str = GOOD) -> Path:
    """The text as a file beside the checkpoints."""
    path = directory / "appliance.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(directory: Path, text: str) -> list[Problem]:
    """Everything wrong with the text."""
    with pytest.raises(ConfigError) as caught:
        load_config(write(directory, text))
    assert str(caught.value).splitlines() == [str(problem) for problem in caught.value.problems]
    return list(caught.value.problems)


def only_problem(directory: Path, text: str) -> Problem:
    """The one thing wrong with the text."""
    (problem,) = problems(directory, text)
    return problem


@pytest.fixture
def models(tmp_path: Path, fake_checkpoint: Make) -> Path:
    """A directory with the checkpoint `tiny`: weights of 1 MiB, 512 bytes of KV per token."""
    fake_checkpoint()
    return tmp_path


def test_units_and_paths_are_resolved(models: Path) -> None:
    """Sizes become bytes, durations seconds, and paths absolute; what is not said has a default."""
    text = GOOD + 'slo = { ttft = "2m", tbt = "50ms", gap = "50ms" }\n'
    text += 'batch_slo = { ttft = "8h" }\n[journal]\npath = "run.journal"\n'
    config = load_config(write(models, '[api]\nbind = "[::1]:80"\nkeep_alive = "1.5s"\n' + text))

    assert (config.api.bind.host, config.api.bind.port) == ("::1", 80)
    assert config.api.keep_alive_seconds == 1.5
    assert config.devices.memory_bytes == 8 << 20
    assert (config.devices.slab_bytes, config.devices.slabs) == (64 << 10, 128)
    assert config.policy.use == ("appliance",)
    assert config.journal.path == str(models / "run.journal")
    (model,) = config.models
    assert model.path == str(models / "tiny")
    assert model.slo == SloTable(
        ttft_seconds=Seconds(120), tbt_seconds=Seconds(0.05), gap_seconds=Delay(0.05)
    )
    assert model.batch_slo == BatchSlo(ttft_seconds=Seconds(28800), tbt_seconds=Seconds(2))
    assert model.max_batch == 32
    assert model.max_sequences == 256
    assert warnings(config) == []


@pytest.mark.parametrize(
    ("line", "key", "words"),
    [
        ('slo = { gap = "99ms" }', "slo", "0.099 s are less than the 0.1 s between tokens"),
        ('batch_slo = { gap = "1s" }', "batch_slo", "1 s are less than the 2 s between tokens"),
    ],
)
def test_a_gap_is_not_below_the_time_between_tokens(
    models: Path, line: str, key: str, words: str
) -> None:
    """Tokens that are in time would miss it. The remedy says what may be written."""
    problem = only_problem(models, f"{GOOD}{line}\n")

    assert problem.key == f"model[0].{key}.gap"
    assert problem.wrong == words
    assert problem.remedy.startswith(f"use {words.split()[6]}s or more, a shorter tbt, or")


def test_a_home_is_where_its_user_is(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` in a path is the home of the user that reads the configuration."""
    monkeypatch.setenv("HOME", str(models))
    home = GOOD.replace('path = "tiny"', 'path = "~/tiny"')
    config = load_config(write(models, home + '[journal]\npath = "~/run.journal"\n'))

    assert config.models[0].path == str(models / "tiny")
    assert config.journal.path == str(models / "run.journal")


@pytest.mark.parametrize(
    ("home", "remedy"),
    [
        ("/home/of-a-service", r"`~` is /home/of-a-service for the user that reads this: write"),
        (None, "the user that reads this has no home: write the whole path"),
    ],
)
def test_a_missing_path_in_a_home_says_whose_home_that_is(
    models: Path, monkeypatch: pytest.MonkeyPatch, home: str | None, remedy: str
) -> None:
    """An admin and a service have different ones."""
    if home is not None:
        monkeypatch.setenv("HOME", home)
    else:
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(os, "getuid", lambda: 123_456_789)
    with pytest.raises(ConfigError, match=remedy):
        load_config(write(models, GOOD.replace('path = "tiny"', 'path = "~/nowhere"')))


def test_policy_parameters_reach_the_policy(models: Path) -> None:
    """A table below [policy] is kept as it is, and checked by the policy itself."""
    config = load_config(write(models, GOOD + "[policy.aegaeon]\nmax_group = 4\n"))

    assert config.policy.parameters == {"aegaeon": {"max_group": 4}}

    problem = only_problem(models, GOOD + "[policy.aegaeon]\nmax_group = 4\nmax_grop = 4\n")

    assert (problem.line, problem.key) == (13, "policy.aegaeon.max_grop")
    assert problem.wrong == "policy aegaeon has no parameter max_grop"
    assert problem.remedy == "did you mean max_group?"


def test_decisions_are_given_to_policies(models: Path) -> None:
    """A key of [policy] for each; those that are not given, or empty, are left to `use`."""
    text = '[policy]\nuse = ["serverlessllm"]\nround = "aegaeon"\nflow = ""\nbudget = "20ms"\n'
    table = load_config(write(models, text + "[policy.aegaeon]\nmax_group = 4\n" + GOOD)).policy

    assert table.choice == PolicyChoice(
        use=("serverlessllm",),
        decisions={"round": "aegaeon"},
        parameters={"aegaeon": {"max_group": 4}},
    )
    assert table.budget_seconds == 0.02
    assert set(HOOKS) < set(fields(PolicyTable))


@pytest.mark.parametrize(
    ("policy", "line", "key", "wrong", "remedy"),
    [
        ('rond = "serverlessllm"', 2, "policy.rond", "unknown key", "did you mean round?"),
        (
            'round = "serverlesllm"',
            2,
            "policy.round",
            "no policy 'serverlesllm'",
            "did you mean serverlessllm?",
        ),
        ("round = 1", 2, "policy.round", "expected `str`", 'write "1"'),
        ('use = ["lifo"]', 2, "policy.use", "no policy 'lifo'", "use aegaeon"),
        (
            'use = ["serverlessllm", "serverlessllm"]',
            2,
            "policy.use",
            "serverlessllm is listed twice",
            "once",
        ),
        ("use = []", 2, "policy.use", "length >= 1", "got []"),
        ('budget = "0s"', 2, "policy.budget", "duration", "got '0s'"),
        ("[policy.lifo]\nx = 1", 2, "policy.lifo", "no policy 'lifo'", "use aegaeon"),
        (
            "[policy.serverlessllm]\nmax_group = 0",
            3,
            "policy.serverlessllm.max_group",
            ">= 1",
            "correct it",
        ),
    ],
)
def test_each_problem_with_policies_is_named(
    models: Path, policy: str, line: int, key: str, wrong: str, remedy: str
) -> None:
    """At the key of the file where it stands, decisions and parameters alike."""
    problem = only_problem(models, f"[policy]\n{policy}\n{GOOD}")

    assert (problem.line, problem.key) == (line, key)
    assert wrong in problem.wrong
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("change", "line", "key", "wrong", "remedy"),
    [
        (("slab =", "slap ="), 3, "devices.slap", "unknown key", "did you mean slab?"),
        (("dtype =", "zzz ="), 10, "model[0].zzz", "unknown key", "use name, path, max_context"),
        (("[devices]", "[device]\n[devices]"), 1, "device", "unknown key", "mean devices?"),
        (('"8MiB"', "true"), 2, "devices.memory", "expected a size", "got true"),
        (('"8MiB"', '"8 monkeys"'), 2, "devices.memory", "expected a size", "got '8 monkeys'"),
        (('"8MiB"', '"90%"'), 2, "devices.memory", "a share is of a GPU's memory", "give a size"),
        (('"8MiB"', '"101%"'), 2, "devices.memory", "at most 100%", "got '101%'"),
        (('"8MiB"', '"x%"'), 2, "devices.memory", 'a share, such as "90%"', "got 'x%'"),
        (('"8MiB"', '"0.5B"'), 2, "devices.memory", "whole number of bytes", "got '0.5B'"),
        (('"8MiB"', "0"), 2, "devices.memory", "expected a size", "got 0"),
        (('"64KiB"', '"96KiB"'), 3, "devices.slab", "96KiB is not a power of two", '"2MiB"'),
        (('"64KiB"', '"1KiB"'), 3, "devices.slab", "power of two of at least 4KiB", '"2MiB"'),
        (('"64KiB"', '"64KiB"\ninstances = 0'), 4, "devices.instances", ">= 1", "got 0"),
        (('"64KiB"', '"64KiB"\nkind = "gpu"'), 4, "devices.kind", "not a choice", "cuda or cpu"),
        (("[devices]", "[api]\nprocesses = 0\n[devices]"), 2, "api.processes", ">= 1", "got 0"),
        (("[devices]", '[api]\nprocesses = "x"\n[devices]'), 2, "api.processes", "no", "auto"),
        (("[devices]", '[api]\nroot_path = "llm/"\n[devices]'), 2, "api.root_path", "", "'llm/'"),
        (("[devices]", '[api]\nroot_path = "/v1"\n[devices]'), 2, "api.root_path", "/v1", "/llm"),
        (('"float32"', '"float32"\nmax_logprobs = -1'), 11, "model[0].max_logprobs", ">= 0", "-1"),
        (('"float32"', '"float32"\nmax_logprobs = 300000'), 11, "model[0].max_logprobs", "<=", "3"),
        (("1024", '"1k"'), 9, "model[0].max_context", "expected `int`", "write 1024"),
        (("1024", "4096"), 9, "model[0].max_context", "more than the model's 2048", "2048 or less"),
        (('"float32"', '"int4"'), 10, "model[0].dtype", "'int4' is not a choice", "use auto"),
        (('"tiny"', '"a b"'), 7, "model[0].name", "match", "got 'a b'"),
        (('path = "tiny"', 'path = "nowhere"'), 8, "model[0].path", "nowhere is not a dir", "give"),
        (('"8MiB"', '"1MiB"'), 6, "model[0]", "tiny needs 1MiB for its weights and", "1.5MiB"),
        (('"16MiB"', '"128KiB"'), 4, "devices.host_cache", "do not hold the KV cache", "or more"),
    ],
)  # fmt: skip
def test_each_problem_says_where_what_and_how(
    models: Path, change: tuple[str, str], line: int, key: str, wrong: str, remedy: str
) -> None:
    """One wrong thing is one problem: file, line, key, what is wrong, and the remedy."""
    problem = only_problem(models, GOOD.replace(*change, 1))

    assert (problem.file, problem.line, problem.key) == (
        str(models / "appliance.toml"), line, key,
    )  # fmt: skip
    assert wrong in problem.wrong
    assert remedy in problem.remedy
    assert str(problem).startswith(f"{problem.file}:{line}: {key}: ")


@pytest.mark.parametrize(
    "bind", ['"nowhere"', '"localhost:http"', '"::1:80"', '":80"', '"h:65536"', "80"]
)
def test_addresses_are_host_and_port(models: Path, bind: str) -> None:
    """Anything that is not host:port is refused, also an IPv6 address without brackets."""
    problem = only_problem(models, f"[api]\nbind = {bind}\n{GOOD}")

    assert (problem.line, problem.key) == (2, "api.bind")
    assert "host:port" in problem.wrong


@pytest.mark.parametrize("slo", ['{ ttft = "0s" }', "{ ttft = 10 }", '{ ttft = "10 years" }'])
def test_durations_need_a_unit_and_a_length(models: Path, slo: str) -> None:
    """A bare number, zero, and an unknown unit are refused at the inner key."""
    problem = only_problem(models, f"{GOOD}slo = {slo}\n")

    assert (problem.line, problem.key) == (11, "model[0].slo.ttft")
    assert "duration" in problem.wrong


def test_all_problems_are_reported_together(models: Path) -> None:
    """Problems of several tables come in the order of the file."""
    text = GOOD.replace('"8MiB"', '"x"').replace("dtype", "dtipe") + "[api]\nbnd = 3\n"

    found = problems(models, text)

    assert [(problem.line, problem.key) for problem in found] == [
        (2, "devices.memory"), (10, "model[0].dtipe"), (11 + 1, "api.bnd"),
    ]  # fmt: skip


def test_names_and_policies_are_compared(models: Path) -> None:
    """Duplicate models, and policies that are not installed or listed twice."""
    second = GOOD[GOOD.index("[[model]]") :]
    policy = '[policy]\nuse = ["serverlesllm", "aegaeon", "aegaeon"]\n[policy.lifo]\nx = 1\n'

    found = problems(models, policy + GOOD + second)

    assert [(problem.line, problem.key) for problem in found] == [
        (2, "policy.use"), (2, "policy.use"), (3, "policy.lifo"), (16, "model[1].name"),
    ]  # fmt: skip
    assert "serverlesllm" in found[0].wrong
    assert found[0].remedy == "did you mean serverlessllm?"
    assert "twice" in found[1].wrong
    assert "line 11 already" in found[3].wrong


def test_what_is_no_table_is_said(models: Path) -> None:
    """Tables given as values, and a file without models."""
    found = problems(models, "api = 3\nmodel = []\n")

    assert {(problem.key, problem.wrong) for problem in found} == {
        ("api", "expected a table, got 3"),
        ("model", "expected at least one table"),
    }
    assert only_problem(models, GOOD[: GOOD.index("[[")]).remedy == "add [[model]] for each model"


def test_files_that_are_not_toml_are_refused(tmp_path: Path) -> None:
    """A file that is absent, is not text, or breaks off is one problem at its line."""
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "absent.toml")
    assert only_problem(tmp_path, "[api]\nbind = \n").line == 2
    assert "not TOML" in only_problem(tmp_path, "[api").wrong
    path = write(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)


def test_a_tokenizer_is_needed(models: Path) -> None:
    """A checkpoint without a tokenizer is refused before anything starts."""
    (models / "tiny" / "tokenizer.json").unlink()
    problem = only_problem(models, GOOD)

    assert (problem.line, problem.key) == (8, "model[0].path")
    assert "has no tokenizer: none of tokenizer.json" in problem.wrong


@pytest.mark.parametrize(
    ("lines", "key", "wrong"),
    [
        ('autopilot = "apply"', "autopilot", "there is none"),
        ("autopilot = true", "autopilot", "true is not a choice"),
        ('autopilot_interval = "9s"', "autopilot_interval", "less than 10 s"),
        ('autopilot_cpu = "500ms"', "autopilot_cpu", "less than 1 s"),
        ('autopilot_window = "1s"', "autopilot_window", "less than 10 s"),
        ('autopilot_watch = "1ms"', "autopilot_watch", "less than 5 s"),
        ('autopilot_cpu = "301s"', "autopilot_cpu", "more than one replay may take"),
    ],
)
def test_an_autopilot_that_cannot_work(models: Path, lines: str, key: str, wrong: str) -> None:
    """It needs a journal, and each replay has to be within its budget."""
    problem = only_problem(models, f"{GOOD}[policy]\n{lines}\n")

    assert problem.key == f"policy.{key}"
    assert wrong in problem.wrong
    assert problem.remedy


def test_a_journal_needs_its_directory(models: Path) -> None:
    """The journal's directory must be there when the appliance starts."""
    problem = only_problem(models, GOOD + '[journal]\npath = "logs/run.journal"\n')

    assert (problem.line, problem.key) == (12, "journal.path")


def test_kv_goes_to_a_folder_if_one_is_named(models: Path) -> None:
    """Relative to the file; its parent must be there. Without one there is no room for KV."""
    spill = '[devices.kv_spill]\ndirectory = "{}"\nsize = "3GiB"\n'
    config = load_config(write(models, GOOD + spill.format("kv")))
    problem = only_problem(models, GOOD + spill.format("none/kv"))

    assert config.devices.kv_spill.directory == str(models / "kv")
    assert config.devices.kv_spill_bytes == 3 << 30
    assert load_config(write(models, GOOD)).devices.kv_spill_bytes == 0
    assert (problem.line, problem.key) == (12, "devices.kv_spill.directory")
    assert problem.remedy == "create it"


def test_warnings_name_what_is_allowed_but_odd(models: Path) -> None:
    """A public address without TLS, and memory that is not a whole number of slabs."""
    text = GOOD.replace('"8MiB"', '"8200KiB"') + '[api]\nbind = "0.0.0.0:80"\nkeys = "k"\n'

    public, rest = warnings(load_config(write(models, text)))

    assert "without TLS" in public
    assert "8KiB" in rest


@pytest.mark.parametrize("bind", ["0.0.0.0:80", "[::]:80", "192.0.2.1:80", "box.local:80"])
def test_another_address_needs_keys(models: Path, bind: str) -> None:
    """What others can reach is not open to them: the start is refused, and says what to do."""
    problem = only_problem(models, f'[api]\nbind = "{bind}"\n{GOOD}')

    assert (problem.line, problem.key) == (2, "api.bind")
    assert "there are no keys" in problem.wrong
    assert "appliance key create" in problem.remedy
    load_config(write(models, f'[api]\nbind = "{bind}"\nkeys = "keys.json"\n{GOOD}'))


@pytest.mark.parametrize("bind", ["127.0.0.1:80", "127.1.2.3:80", "[::1]:80", "localhost:80"])
def test_this_machine_s_addresses_need_none(models: Path, bind: str) -> None:
    """Nobody else reaches them."""
    assert load_config(write(models, f'[api]\nbind = "{bind}"\n{GOOD}')).api.bind.local


def test_files_of_the_api_are_looked_at(models: Path) -> None:
    """Keys that cannot be read, a place where none could be, and a group that there is not."""
    (models / "broken.json").write_text("{")
    for api, key, wrong in (
        ('keys = "broken.json"', "api.keys", "is no file of keys"),
        ('keys = "none/keys.json"', "api.keys", "is not a directory"),
        ('admin_group = "nobody-has-this"', "api.admin_group", "there is no group"),
    ):
        problem = only_problem(models, f"[api]\n{api}\n{GOOD}")
        assert (problem.line, problem.key) == (2, key)
        assert wrong in problem.wrong
    text = '[api]\nkeys = "k.json"\nadmin_socket = "a.sock"\n' + GOOD
    api = load_config(write(models, text)).api
    assert (api.keys, api.admin_socket) == (str(models / "k.json"), str(models / "a.sock"))


def test_damaged_keys_with_a_copy_are_accepted(models: Path) -> None:
    """The daemon uses the copy."""
    keys = models / "keys.json"
    KeyFile(keys).add(Key(name="alice", sha256="a" * 64, created_seconds=0.0))
    keys.write_bytes(keys.read_bytes()[:-9])
    text = f'[api]\nkeys = "keys.json"\n{GOOD}'
    assert load_config(write(models, text)).api.keys == str(keys)
    copy_of(keys).unlink()
    assert "is no file of keys" in only_problem(models, text).wrong


def test_keys_that_others_can_read_are_warned_of(models: Path) -> None:
    """They are hashes only, but nobody else's business."""
    file = models / "keys.json"
    file.write_text("{}")
    config = load_config(write(models, f'[api]\nkeys = "keys.json"\n{GOOD}'))
    file.chmod(0o640)
    (warning,) = warnings(config)
    assert "`chmod 600`" in warning
    file.chmod(0o600)
    assert warnings(config) == []


def test_the_sample_says_the_defaults() -> None:
    """But for what has none, and what a file has to name: the daemon does the same without it."""
    different = {
        f"{header} {key}"
        for header, (_, keys) in schema().items()
        for key, field in keys.items()
        if not field.required and field.sample != field.default
    }

    assert different == set()


def test_sample_is_generated_and_valid() -> None:
    """etc/appliance.toml is what the schema says, and the daemon's own reader accepts it."""
    sample = ROOT / "etc" / "appliance.toml"

    assert sample.read_text(encoding="utf-8") == configdoc.generate_sample()
    more = '[[model.adapter]]\nname = "x"\npath = "y"\n[[devices.group]]\nname = "x"\n'
    tomllib.loads(f"{configdoc.generate_sample()}{more}")  # tables can be appended
    assert load_config(sample, check_files=False).is_chosen("devices", "memory")


def test_documentation_is_generated_and_complete() -> None:
    """docs/configuration.md is what the schema says; every key has a meaning."""
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")

    assert text == configdoc.generate_docs()
    for line in text.splitlines():
        assert not line.endswith("|  |"), f"no meaning: {line}"
    assert "`progress_deadline`" in text


def test_config_is_frozen(models: Path) -> None:
    """Nobody changes the configuration of a running appliance by accident."""
    config: Config = load_config(write(models))

    with pytest.raises(AttributeError):
        config.devices.instances = 3  # type: ignore[misc]


def test_pinned_weights_must_fit_the_host_cache(models: Path) -> None:
    """Weights that are to stay in the host cache need room there, beside the KV of a request."""
    text = GOOD.replace('"16MiB"', '"1MiB"')
    load_config(write(models, text))

    problem = only_problem(models, f"{text}pin = true\n")

    assert problem.key == "devices.host_cache"
    assert "pinned models (1MiB)" in problem.wrong
    assert "pin fewer" in problem.remedy


def test_models_without_room_in_the_host_cache_are_named(models: Path) -> None:
    """What does not fit beside the others is told; pinned models come first."""
    second = GOOD[GOOD.index("[[model]]") :].replace('"tiny"', '"twin"', 1)
    text = GOOD.replace('"16MiB"', '"2MiB"') + second
    entries = [read_checkpoint(name, models / "tiny", "float32") for name in ("tiny", "twin")]

    assert uncached(load_config(write(models, text)), entries) == ["twin"]
    assert uncached(load_config(write(models, f"{text}pin = true\n")), entries) == ["tiny"]
    roomy = text.replace('host_cache = "2MiB"', 'host_cache = "8MiB"')
    assert uncached(load_config(write(models, roomy)), entries) == []


def test_the_folder_of_models(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is beside the file, or where systemd keeps state, or nowhere."""
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    assert load_config(write(models)).catalog.folder == ""
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/appliance:/var/lib/other")
    assert load_config(write(models)).catalog.folder == "/var/lib/appliance/models"

    beside = load_config(write(models, GOOD + '[catalog]\nfolder = "here"\n'))
    none = load_config(write(models, GOOD + '[catalog]\nfolder = ""\n'))

    assert (beside.catalog.folder, none.catalog.folder) == (str(models / "here"), "")


@pytest.mark.parametrize(
    ("setting", "key", "wrong"),
    [
        ('image_hosts = ["a.org", "https://b.org/x"]', "api.image_hosts[1]", "is no host such as"),
        ('image_hosts = ["*"]', "api.image_hosts[0]", "is no host such as"),
        ('image_networks = ["10.0.0.1/8"]', "api.image_networks[0]", "has host bits set"),
        ('image_networks = ["lan"]', "api.image_networks[0]", "does not appear to be"),
    ],
)
def test_images_come_from_hosts_and_networks(
    models: Path, setting: str, key: str, wrong: str
) -> None:
    problem = only_problem(models, f"[api]\n{setting}\n{GOOD}")

    assert problem.key == key
    assert wrong in problem.wrong
