"""Mistakes that people make in a configuration, each with the exact message that tells of it: its
line, its key, what is wrong, and what to do. None of them starts anything.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import pytest

from appliance.config.loader import load_config
from appliance.config.schema import schema
from appliance.errors import ConfigError
from appliance.platform import machine_memory
from appliance.platform.machine_memory import MachineMemory
from tests.conftest import write_checkpoint

GOOD: Final = """\
[api]
bind = "127.0.0.1:11500"

[devices]
kind = "cpu"
memory = "8MiB"
slab = "64KiB"
host_cache = "16MiB"

[policy]
use = ["appliance"]

[[model]]
name = "tiny"
path = "tiny"
max_context = 1024
dtype = "float32"
"""
POINTER: Final = "version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 4937\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the configuration is, among models: a whole one and others that cannot be served."""
    here = tmp_path_factory.mktemp("mistakes")
    tiny = write_checkpoint(here / "tiny")
    for name, file in (
        ("pointer-weights", "model.safetensors"),
        ("pointer-config", "config.json"),
        ("pointer-tokenizer", "tokenizer.json"),
    ):
        shutil.copytree(tiny, here / name)
        (here / name / file).write_text(POINTER, encoding="ascii")
    shutil.copytree(tiny, here / "no-tokenizer")
    (here / "no-tokenizer" / "tokenizer.json").unlink()
    shutil.copytree(tiny, here / "pickles")
    (here / "pickles" / "model.safetensors").rename(here / "pickles" / "pytorch_model.bin")
    for name in ("gguf", "empty"):
        (here / name).mkdir()
    (here / "gguf" / "model.gguf").write_bytes(b"GGUF")
    return here


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 24 GiB."""
    memory = MachineMemory(24 << 30, 20 << 30)
    monkeypatch.setattr(machine_memory, "read_memory", lambda: memory)


def mistake(right: str, wrong: str, *messages: str) -> object:
    """Instead of what is right in `GOOD`, and all that is told of it, without the file's name."""
    return pytest.param(right, wrong, messages, id=wrong.replace("\n", "|") or f"no {right}")


MISTAKES: Final = [
    mistake(
        'bind = "127.0.0.1:11500"',
        'bind = "0.0.0.0:11500"',
        "2: api.bind: 0.0.0.0:11500 can be reached from outside this machine, and there are no "
        'keys; add keys = "keys.json" and make one with `appliance key create NAME`, or use '
        "127.0.0.1",
    ),
    mistake(
        'bind = "127.0.0.1:11500"',
        'bind = "127.0.0.1"',
        '2: api.bind: expected "host:port", such as "127.0.0.1:11500"; got \'127.0.0.1\'',
    ),
    mistake(
        'bind = "127.0.0.1:11500"',
        "bind = 11500",
        '2: api.bind: expected "host:port", such as "127.0.0.1:11500"; got 11500',
    ),
    mistake(
        'bind = "127.0.0.1:11500"',
        'bind = "127.0.0.1:99999"',
        '2: api.bind: expected "host:port", such as "127.0.0.1:11500"; got \'127.0.0.1:99999\'',
    ),
    mistake(
        'bind = "127.0.0.1:11500"',
        'bnd = "127.0.0.1:11500"',
        "2: api.bnd: unknown key; did you mean bind?",
    ),
    mistake(
        'bind = "127.0.0.1:11500"',
        'bind = "127.0.0.1:1"\nbind = "127.0.0.1:2"',
        "3: api.bind: bind is set twice, first at line 2; leave one of the two",
    ),
    mistake(
        "[api]",
        "[apis]",
        "1: apis: unknown key; did you mean api?",
    ),
    mistake(
        "[api]",
        '[api]\nkeys = "nowhere/keys.json"',
        "2: api.keys: nowhere is not a directory; create it",
    ),
    mistake(
        "[api]",
        "[api]\nkeys = true",
        "2: api.keys: expected `str`, got `bool`; got true",
    ),
    mistake(
        "[api]",
        '[api]\nopen_metrics = "yes"',
        "2: api.open_metrics: expected `bool`, got `str`; write true",
    ),
    mistake(
        "[api]",
        "[api]\nkey_share = 1.5",
        "2: api.key_share: expected `float` <= 1.0; got 1.5",
    ),
    mistake(
        "[api]",
        "[api]\nmax_waiting = 0",
        "2: api.max_waiting: expected `int` >= 1; got 0",
    ),
    mistake(
        "[api]",
        "[api]\nmax_wait = 300",
        '2: api.max_wait: expected a duration, such as "10s" or "100ms" (units: us, ms, s, m, '
        'h); write "300s" or "300ms"',
    ),
    mistake(
        "[api]",
        '[api]\ntls_certificate = "cert.pem"',
        "2: api.tls_certificate: cert.pem cannot be read: No such file or directory; correct "
        "the path",
    ),
    mistake(
        "[api]",
        '[api]\nprocesses = "four"',
        "2: api.processes: 'four' is not a choice; use auto or a whole number from 1 on",
    ),
    mistake(
        "[api]",
        '[api]\nroot_path = "llm/"',
        "2: api.root_path: expected `str` matching regex '^(/[A-Za-z0-9._~-]+)*\\\\Z'; got 'llm/'",
    ),
    mistake(
        "[api]",
        '[api]\nroot_path = "/v1/llm"',
        '2: api.root_path: /v1 is where the API itself has paths; use another one, such as "/llm"',
    ),
    mistake(
        "[api]",
        '[api]\norigins = "https://chat.example.org"',
        '2: api.origins: expected `array`, got `str`; write ["https://chat.example.org"]',
    ),
    mistake(
        "[api]",
        '[api]\nimage_hosts = ["https://images.example.org/path"]',
        "2: api.image_hosts[0]: 'https://images.example.org/path' is no host such as "
        '"images.example.org"; name hosts, such as "images.example.org", "*.example.org" or '
        '"http://store:8080"',
    ),
    mistake(
        "[api]",
        '[api]\nimage_networks = ["10.1.2.3/24"]',
        "2: api.image_networks[0]: 10.1.2.3/24 has host bits set; name networks, such as "
        '"10.1.2.0/24"',
    ),
    mistake(
        "[api]",
        "[api]\nmax_body = 8",
        '2: api.max_body: 8 means bytes; write "8MiB" or "8GiB"',
    ),
    mistake(
        "[api]",
        '[api]\nkeep_alive = "5 seconds"',
        '2: api.keep_alive: expected a duration, such as "10s" or "100ms" (units: us, ms, s, m, '
        "h); got '5 seconds'",
    ),
    mistake(
        "[api]",
        '[api]\ndrain = "-5s"',
        '2: api.drain: expected a duration, such as "10s" or "100ms" (units: us, ms, s, m, h); '
        "got '-5s'",
    ),
    mistake(
        "[api]",
        '[api]\nmax_queue = "1k"',
        "2: api.max_queue: expected `int`, got `str`; write 1024",
    ),
    mistake(
        "[api]",
        '[api]\nadmin_group = "no-such-group"',
        "2: api.admin_group: there is no group 'no-such-group'; create it, or leave it out",
    ),
    mistake(
        "[api]",
        "[api]\nstrict = 1",
        "2: api.strict: expected `bool`, got `int`; write true",
    ),
    mistake(
        'kind = "cpu"',
        'kind = "gpu"',
        "5: devices.kind: 'gpu' is not a choice; use auto, cuda or cpu",
    ),
    mistake(
        'memory = "8MiB"',
        'memory = "automatic"',
        "6: devices.memory: 'automatic' is not a choice; use \"auto\", or a size",
    ),
    mistake(
        'memory = "8MiB"',
        "memory = 64",
        '6: devices.memory: 64 means bytes; write "64MiB" or "64GiB"',
    ),
    mistake(
        'memory = "8MiB"',
        'memory = "64"',
        '6: devices.memory: 64 means bytes; write "64MiB" or "64GiB"',
    ),
    mistake(
        'memory = "8MiB"',
        'memory = "8 gigs"',
        '6: devices.memory: expected a size, such as "192MiB" (units: B, KiB, MiB, GiB, TiB, '
        "kB, MB, GB, TB); got '8 gigs'",
    ),
    mistake(
        'memory = "8MiB"',
        'memory = "90%"',
        "6: devices.memory: a share is of a GPU's memory, and models run on the CPU here; give "
        "a size, such as 192MiB",
    ),
    mistake(
        'memory = "8MiB"',
        'memory = "120%"',
        "6: devices.memory: expected a share of more than 0% and at most 100%; got '120%'",
    ),
    mistake(
        'memory = "8MiB"',
        "memory = 8MiB",
        '6: devices.memory: 8MiB is not a value of TOML; write memory = "8MiB"',
    ),
    mistake(
        'memory = "8MiB"',
        'memory = "48KiB"',
        "6: devices.memory: is smaller than a slab of 64KiB; make it larger",
    ),
    mistake(
        'memory = "8MiB"',
        'memory = "1MiB"',
        "13: model[0]: tiny needs 1MiB for its weights and 512KiB for the KV cache of one "
        "request, in slabs of 64KiB: more than devices.memory (1MiB) has; set devices.memory to "
        "1.5MiB or more, a smaller devices.slab",
    ),
    mistake(
        'memory = "8MiB"',
        'memory = "200GiB"',
        "6: devices.memory: pools 200GiB + host cache 16MiB are more than the 24GiB of memory "
        "of this machine; set it to less than 24560MiB",
    ),
    mistake(
        'memory = "8MiB"',
        'memroy = "8MiB"',
        "6: devices.memroy: unknown key; did you mean memory?",
    ),
    mistake(
        'host_cache = "16MiB"',
        'host_cache = "200GiB"',
        "8: devices.host_cache: pools 8MiB + host cache 200GiB are more than the 24GiB of "
        "memory of this machine; set it to less than 24568MiB",
    ),
    mistake(
        'host_cache = "16MiB"',
        'host_cache = "128KiB"',
        "8: devices.host_cache: 128KiB do not hold the KV cache of one request (512KiB); set it "
        "to 512KiB or more",
    ),
    mistake(
        'host_cache = "16MiB"',
        "host_cache = -1",
        '8: devices.host_cache: expected a size, such as "192MiB" (units: B, KiB, MiB, GiB, '
        "TiB, kB, MB, GB, TB); got -1",
    ),
    mistake(
        'host_cache = "16MiB"',
        'hostcache = "16MiB"',
        "8: devices.hostcache: unknown key; did you mean host_cache?",
    ),
    mistake(
        'slab = "64KiB"',
        "slab = 2",
        '7: devices.slab: 2 means bytes; write "2MiB" or "2GiB"',
    ),
    mistake(
        'slab = "64KiB"',
        'slab = "96KiB"',
        '7: devices.slab: 96KiB is not a power of two of at least 4KiB; use a size such as "2MiB"',
    ),
    mistake(
        'slab = "64KiB"',
        'slab = "64KiB"\ninstances = 0',
        "8: devices.instances: expected `int` >= 1; got 0",
    ),
    mistake(
        'slab = "64KiB"',
        'slab = "64KiB"\ninstances = "2"',
        "8: devices.instances: expected `int`, got `str`; write 2",
    ),
    mistake(
        'slab = "64KiB"',
        'slab = "64KiB"\ninstances = 1.5',
        "8: devices.instances: expected `int`, got `float`; got 1.5",
    ),
    mistake(
        'slab = "64KiB"',
        'slab = "64KiB"\ntensor_parallel = 3',
        "16: model[0].path: tiny: its vocabulary, padded to 128 rows, cannot be divided among 3 "
        "ranks; take a tensor_parallel that divides it, in [devices] or in the groups of the "
        "model",
    ),
    mistake(
        'slab = "64KiB"',
        'slab = "64KiB"\nhost_cache_codec = "zstd"',
        "8: devices.host_cache_codec: 'zstd' is not a choice; use none or exp7",
    ),
    mistake(
        'slab = "64KiB"',
        'slab = "64KiB"\nhost_cache_codec = "exp7"\nimages = "images"',
        '8: devices.host_cache_codec: images on disk are those of plain weights; use "none", or '
        "no devices.images",
    ),
    mistake(
        'slab = "64KiB"',
        'slab = "64KiB"\nkv_spill = "kv"',
        "8: devices.kv_spill: expected a table, got 'kv'; write [devices.kv_spill]",
    ),
    mistake(
        'slab = "64KiB"',
        'slab = "64KiB"\nkv_spill = { directory = "a/b/kv" }',
        "8: devices.kv_spill.directory: a/b is not a directory; create it",
    ),
    mistake(
        'slab = "64KiB"',
        'slab = "64KiB"\nkv_spill = { dir = "kv" }',
        "8: devices.kv_spill.dir: unknown key; use directory or size",
    ),
    mistake(
        'slab = "64KiB"',
        'slab = "64KiB"\nslab = "64KiB"',
        "8: devices.slab: slab is set twice, first at line 7; leave one of the two",
    ),
    mistake(
        "[policy]",
        '[[devices.group]]\nname = "a"\n[[devices.group]]\nname = "a"\n[policy]',
        "13: devices.group[1].name: a is the name of another group; use its own",
    ),
    mistake(
        "[policy]",
        "[[devices.group]]\ninstances = 2\n[policy]",
        '10: devices.group[0].name: is missing; add name = "pair"',
    ),
    mistake(
        "[policy]",
        '[[devices.group]]\nname = "a"\ngpus = [0]\n[policy]',
        "12: devices.group[0].gpus: models run on the CPU here; leave it out, and say how many "
        "instances the group has",
    ),
    mistake(
        "[devices]",
        "[device]",
        "4: device: unknown key; did you mean devices?",
    ),
    mistake(
        "[devices]",
        "[[devices]]",
        "4: devices: expected a table, got [{'kind': 'cpu', 'memory': '8MiB', 'slab': '64KiB', "
        "'host...; write [devices]",
    ),
    mistake(
        'use = ["appliance"]',
        'use = "appliance"',
        '11: policy.use: expected `array`, got `str`; write ["appliance"]',
    ),
    mistake(
        'use = ["appliance"]',
        "use = []",
        "11: policy.use: expected `array` of length >= 1; got []",
    ),
    mistake(
        'use = ["appliance"]',
        'use = ["aplliance"]',
        "11: policy.use: no policy 'aplliance' is installed; did you mean appliance?",
    ),
    mistake(
        'use = ["appliance"]',
        'use = ["appliance", "appliance"]',
        "11: policy.use: appliance is listed twice; list it once",
    ),
    mistake(
        'use = ["appliance"]',
        'rond = "aegaeon"',
        "11: policy.rond: unknown key; did you mean round?",
    ),
    mistake(
        'use = ["appliance"]',
        'round = "aegeon"',
        "11: policy.round: no policy 'aegeon' is installed; did you mean aegaeon?",
    ),
    mistake(
        'use = ["appliance"]',
        "budget = 50",
        '11: policy.budget: expected a duration, such as "10s" or "100ms" (units: us, ms, s, m, '
        'h); write "50s" or "50ms"',
    ),
    mistake(
        'use = ["appliance"]',
        'autopilot = "on"',
        "11: policy.autopilot: 'on' is not a choice; use off, propose or apply",
    ),
    mistake(
        'use = ["appliance"]',
        'autopilot = "apply"',
        "11: policy.autopilot: the autopilot replays the end of the journal, and there is none; "
        'add [journal] with path = "journal.jsonl", or use "off"',
    ),
    mistake(
        'use = ["appliance"]',
        'autopilot_interval = "1s"',
        '11: policy.autopilot_interval: is less than 10 s; use "10s" or more',
    ),
    mistake(
        'use = ["appliance"]',
        "[policy.aegaeon]\nmax_grop = 4",
        "12: policy.aegaeon.max_grop: policy aegaeon has no parameter max_grop; did you mean "
        "max_group?",
    ),
    mistake(
        'use = ["appliance"]',
        '[policy.aegaeon]\nmax_group = "4"',
        "12: policy.aegaeon.max_group: Expected `int`, got `str` - at `$.max_group`; correct it "
        "or remove it from [policy.aegaeon]",
    ),
    mistake(
        'use = ["appliance"]',
        "[policy.aegeon]\nmax_group = 4",
        "11: policy.aegeon: no policy 'aegeon' is installed; did you mean aegaeon?",
    ),
    mistake(
        "[policy]",
        '[journal]\npath = "nowhere/run.journal"\n[policy]',
        "11: journal.path: nowhere is not a directory; create it",
    ),
    mistake(
        "[policy]",
        '[journal]\nmax_size = "4 GB of it"\n[policy]',
        '11: journal.max_size: expected a size, such as "192MiB" (units: B, KiB, MiB, GiB, TiB, '
        "kB, MB, GB, TB); got '4 GB of it'",
    ),
    mistake(
        "[policy]",
        '[jornal]\npath = "run.journal"\n[policy]',
        "10: jornal: unknown key; did you mean journal?",
    ),
    mistake(
        "[policy]",
        '[usage]\ndirectory = "a/b/usage"\n[policy]',
        "11: usage.directory: a/b is not a directory; create it",
    ),
    mistake(
        "[policy]",
        "[usage]\nkeep_months = 0\n[policy]",
        "11: usage.keep_months: expected `int` >= 1; got 0",
    ),
    mistake(
        "[policy]",
        '[batches]\ndirectory = "a/b/batches"\n[policy]',
        "11: batches.directory: a/b is not a directory; create it",
    ),
    mistake(
        "[policy]",
        "[batches]\nconcurrency = -1\n[policy]",
        "11: batches.concurrency: expected `int` >= 1; got -1",
    ),
    mistake(
        "[policy]",
        '[batches]\nkeep_days = "30d"\n[policy]',
        "11: batches.keep_days: expected `int`, got `str`; got '30d'",
    ),
    mistake(
        "[policy]",
        '[batches]\nfolder = "batches"\n[policy]',
        "11: batches.folder: unknown key; use directory, concurrency, max_file, max_requests, "
        "max_stored, max_stored_per_key or keep_days",
    ),
    mistake(
        "[policy]",
        '[log]\nlevel = "warn"\n[policy]',
        "11: log.level: 'warn' is not a choice; use debug, info, warning or error",
    ),
    mistake(
        "[policy]",
        '[log]\nformat = "text"\n[policy]',
        "11: log.format: 'text' is not a choice; use auto, json or console",
    ),
    mistake(
        "[policy]",
        "[log]\nlevel = debug\n[policy]",
        '11: log.level: debug is not a value of TOML; write level = "debug"',
    ),
    mistake(
        "[policy]",
        '[telemetry]\nendpoint = "127.0.0.1:4318"\n[policy]',
        "11: telemetry.endpoint: '127.0.0.1:4318' is not the address of an HTTP server; use one "
        'such as "http://127.0.0.1:4318"',
    ),
    mistake(
        "[policy]",
        "[telemetry]\nsample_ratio = 10\n[policy]",
        "11: telemetry.sample_ratio: expected `float` <= 1.0; got 10",
    ),
    mistake(
        "[policy]",
        "[telemetry]\ntraces = True\n[policy]",
        "11: telemetry.traces: True is not a value of TOML; write traces = true",
    ),
    mistake(
        "[policy]",
        "[catalog]\nfolder = []\n[policy]",
        "11: catalog.folder: expected `str`, got `array`; got []",
    ),
    mistake(
        "[policy]",
        '[catalogue]\nfolder = "models"\n[policy]',
        "10: catalogue: unknown key; did you mean catalog?",
    ),
    mistake(
        'name = "tiny"\n',
        "",
        '13: model[0].name: is missing; add name = "llama-a"',
    ),
    mistake(
        'name = "tiny"',
        'name = "my model"',
        "14: model[0].name: expected `str` matching regex '^[A-Za-z0-9][A-Za-z0-9._:/-]*$'; got "
        "'my model'; use one such as \"llama-a\"",
    ),
    mistake(
        'name = "tiny"',
        "name = 7",
        '14: model[0].name: expected `str`, got `int`; write "7"',
    ),
    mistake(
        'name = "tiny"',
        'Name = "tiny"',
        '13: model[0].name: is missing; add name = "llama-a"',
        "14: model[0].Name: unknown key; did you mean name?",
    ),
    mistake(
        'path = "tiny"',
        'path = "meta-llama/Llama-3.1-8B-Instruct"',
        "15: model[0].path: meta-llama/Llama-3.1-8B-Instruct is not a directory; use `appliance "
        "pull meta-llama/Llama-3.1-8B-Instruct --dir DIR --no-add` and set path to the folder that "
        "it prints, or give the directory of a checkpoint",
    ),
    mistake(
        'path = "tiny"',
        'path = "nowhere"',
        "15: model[0].path: nowhere is not a directory; give the directory of a whole "
        "checkpoint in safetensors format",
    ),
    mistake(
        'path = "tiny"',
        'path = "~nobody-here/tiny"',
        "15: model[0].path: ~nobody-here/tiny is not a directory; give the directory of a whole "
        "checkpoint in safetensors format",
    ),
    mistake(
        'path = "tiny"',
        "path = tiny",
        '15: model[0].path: tiny is not a value of TOML; write path = "tiny"',
    ),
    mistake(
        'path = "tiny"',
        'path = "gguf"',
        "15: model[0].path: gguf/model.gguf: GGUF is not supported; convert or pull safetensors",
    ),
    mistake(
        'path = "tiny"',
        'path = "gguf/model.gguf"',
        "15: model[0].path: gguf/model.gguf: GGUF is not supported; convert or pull safetensors",
    ),
    mistake(
        'path = "tiny"',
        'path = "tiny/config.json"',
        "15: model[0].path: tiny/config.json is a file; give the directory that it is in",
    ),
    mistake(
        'path = "tiny"',
        'path = "pickles"',
        "15: model[0].path: pickles has its weights as .bin files only, which may run code when "
        "they are read; convert them to safetensors, or pull a copy of the model in that format",
    ),
    mistake(
        'path = "tiny"',
        'path = "empty"',
        "15: model[0].path: empty has no config.json; give the directory of a whole checkpoint "
        "in safetensors format",
    ),
    mistake(
        'path = "tiny"',
        'path = "pointer-weights"',
        "15: model[0].path: pointer-weights/model.safetensors is a git-LFS pointer, not the "
        "file itself; run `git lfs pull` in its directory",
    ),
    mistake(
        'path = "tiny"',
        'path = "pointer-config"',
        "15: model[0].path: pointer-config/config.json is a git-LFS pointer, not the file "
        "itself; run `git lfs pull` in its directory",
    ),
    mistake(
        'path = "tiny"',
        'path = "pointer-tokenizer"',
        "15: model[0].path: pointer-tokenizer/tokenizer.json is a git-LFS pointer, not the file "
        "itself; run `git lfs pull` in its directory",
    ),
    mistake(
        'path = "tiny"',
        'path = "no-tokenizer"',
        "15: model[0].path: no-tokenizer has no tokenizer: none of tokenizer.json, "
        "tokenizer.model*, tekken.json, spiece.model, sentencepiece.bpe.model, vocab.json, "
        "vocab.txt; copy the model's there",
    ),
    mistake(
        'path = "tiny"',
        'path = ["tiny"]',
        "15: model[0].path: expected `str`, got `array`; got ['tiny']",
    ),
    mistake(
        "max_context = 1024",
        "max_context = 1024.5",
        "16: model[0].max_context: expected `int`, got `float`; got 1024.5",
    ),
    mistake(
        'dtype = "float32"',
        "reasoning_parser = true",
        "17: model[0].reasoning_parser: expected `str`, got `bool`; got true",
    ),
    mistake(
        'dtype = "float32"',
        'pooler_config = { use_activation = "yes" }',
        "17: model[0].pooler_config.use_activation: 'yes' is not a choice; use true, false or auto",
    ),
    mistake(
        'dtype = "float32"',
        'batch_slo = { ttft = "1 hour" }',
        '17: model[0].batch_slo.ttft: expected a duration, such as "10s" or "100ms" (units: us, '
        "ms, s, m, h); got '1 hour'",
    ),
    mistake(
        "max_context = 1024",
        'max_context = "8k"',
        "16: model[0].max_context: expected `int`, got `str`; write 8192",
    ),
    mistake(
        "max_context = 1024",
        'max_context = "1024"',
        "16: model[0].max_context: expected `int`, got `str`; write 1024",
    ),
    mistake(
        "max_context = 1024",
        "max_context = 0",
        "16: model[0].max_context: expected `int` >= 1; got 0",
    ),
    mistake(
        "max_context = 1024",
        "max_context = 4096",
        "16: model[0].max_context: 4096 tokens are more than the model's 2048; use 2048 or less",
    ),
    mistake(
        "max_context = 1024",
        "max_context = 100000",
        "16: model[0].max_context: 100000 tokens are more than the model's 2048; use 2048 or less",
    ),
    mistake(
        "max_context = 1024",
        'max_context = 1024\nkeep_alive = "30m"',
        "17: model[0].keep_alive: unknown key; weights stay until other models need their memory; "
        "pin = true keeps them in host memory, load = true loads them at the start",
    ),
    mistake(
        "max_context = 1024",
        "max_ctx = 1024",
        "16: model[0].max_ctx: unknown key; did you mean max_context?",
    ),
    mistake(
        "max_context = 1024",
        'max_context = "long"',
        "16: model[0].max_context: 'long' is not a choice; use \"auto\", or a whole number from "
        "1 on",
    ),
    mistake(
        'dtype = "float32"',
        'dtype = "fp16"',
        "17: model[0].dtype: 'fp16' is not a choice; use auto, bfloat16, float16 or float32",
    ),
    mistake(
        'dtype = "float32"',
        'task = "chat"',
        "17: model[0].task: 'chat' is not a choice; use auto, generate, embed, score or "
        "transcription",
    ),
    mistake(
        'dtype = "float32"',
        'slo = "fast"',
        "17: model[0].slo: expected a table, got 'fast'; write [model.slo]",
    ),
    mistake(
        'dtype = "float32"',
        "slo = { ttft = 10 }",
        '17: model[0].slo.ttft: expected a duration, such as "10s" or "100ms" (units: us, ms, '
        's, m, h); write "10s" or "10ms"',
    ),
    mistake(
        'dtype = "float32"',
        'slo = { ttft = "0s" }',
        "17: model[0].slo.ttft: expected a duration of more than 0; got '0s'",
    ),
    mistake(
        'dtype = "float32"',
        'slo = { tpot = "50ms" }',
        "17: model[0].slo.tpot: unknown key; use ttft, tbt or gap",
    ),
    mistake(
        'dtype = "float32"',
        'slo = { tbt = "1s", gap = "500ms" }',
        "17: model[0].slo.gap: 0.5 s are less than the 1 s between tokens; use 1s or more, a "
        'shorter tbt, or "0s" for no such promise',
    ),
    mistake(
        'dtype = "float32"',
        'slo = { ttft = "1s" }\nslo = { tbt = "1s" }',
        "18: model[0].slo: slo is set twice, first at line 17; leave one of the two",
    ),
    mistake(
        'dtype = "float32"',
        'slo = { ttft = "1s", ttft = "2s" }',
        "17: model[0].slo: ttft is set twice; leave one of the two",
    ),
    mistake(
        'dtype = "float32"',
        "max_batch = 0",
        "17: model[0].max_batch: expected `int` >= 1; got 0",
    ),
    mistake(
        'dtype = "float32"',
        'max_sequences = "lots"',
        "17: model[0].max_sequences: expected `int`, got `str`; got 'lots'",
    ),
    mistake(
        'dtype = "float32"',
        "max_logprobs = 300000",
        "17: model[0].max_logprobs: expected `int` <= 262144; got 300000",
    ),
    mistake(
        'dtype = "float32"',
        'pin = "true"',
        "17: model[0].pin: expected `bool`, got `str`; write true",
    ),
    mistake(
        'dtype = "float32"',
        "enabled = false",
        "13: model: no model is enabled; take enabled = false from one",
    ),
    mistake(
        'dtype = "float32"',
        "images = 4",
        "17: model[0].images: images of LlamaForCausalLM are not served, only text; use images = 0",
    ),
    mistake(
        'dtype = "float32"',
        'groups = ["pair"]',
        "17: model[0].groups: there is no group 'pair'; remove it",
    ),
    mistake(
        'dtype = "float32"',
        'groups = "pair"',
        '17: model[0].groups: expected `array`, got `str`; write ["pair"]',
    ),
    mistake(
        'dtype = "float32"',
        'speculate = { method = "medusa" }',
        "17: model[0].speculate.method: there are no drafts by 'medusa': there are ngram, mtp, "
        'eagle, eagle3; use "ngram", or leave speculate out',
    ),
    mistake(
        'dtype = "float32"',
        "speculate = { tokens = 8 }",
        '17: model[0].speculate: it has no method; add method = "ngram", or leave speculate out',
    ),
    mistake(
        'dtype = "float32"',
        'speculate = { method = "eagle" }',
        '17: model[0].speculate.path: a head for "eagle" has no path; set path for eagle and '
        "eagle3, and for nothing else",
    ),
    mistake(
        'dtype = "float32"',
        'speculate = { method = "ngram", prompt_lookup_min = 6 }',
        "17: model[0].speculate.prompt_lookup_min: 6 is more than prompt_lookup_max (5); use 5 "
        "or less",
    ),
    mistake(
        'dtype = "float32"',
        'pooler_config = { pooling_type = "mean" }',
        "17: model[0].pooler_config.pooling_type: 'mean' is not a choice; use auto, CLS, LAST, "
        "MEAN or ALL",
    ),
    mistake(
        'dtype = "float32"',
        'dtype = "float32"\n[[model]]\nname = "tiny"\npath = "tiny"\nmax_context = 512',
        "19: model[1].name: tiny is the name of the model at line 14 already; give each model a "
        "name of its own",
    ),
    mistake(
        'dtype = "float32"',
        '[[model.adapter]]\nname = "legal"',
        '17: model[0].adapter[0].path: is missing; add path = "/srv/adapters/legal"',
    ),
    mistake(
        'dtype = "float32"',
        '[[model.adapter]]\nname = "latest"\npath = "legal"',
        "17: model[0].adapter: legal has no adapter_config.json; take another adapter, or leave "
        "it out",
        "18: model[0].adapter[0].name: tiny:latest is Ollama's name for tiny itself; give it "
        "another name",
    ),
    mistake(
        'dtype = "float32"',
        'max_loras = 1\n[[model.adapter]]\nname = "a"\npath = "a"\n[[model.adapter]]\nname = '
        '"b"\npath = "b"',
        "18: model[0].adapter: tiny has 2 adapters, more than max_loras (1); set max_loras to "
        "so many, or leave some out",
        "18: model[0].adapter: a has no adapter_config.json; take another adapter, or leave it out",
    ),
    mistake(
        'dtype = "float32"',
        'adapter = "legal"',
        "17: model[0].adapter: expected tables; write [[model.adapter]] for each adapter",
    ),
    mistake(
        "[[model]]",
        "[model]",
        "13: model: expected at least one table; write [[model]] for each model",
    ),
    mistake(
        "[[model]]",
        "[[models]]",
        "1: model: is missing; add [[model]] for each model",
        "13: models: unknown key; did you mean model?",
    ),
    mistake(
        "[policy]",
        "[api]\n[policy]",
        "10: api: the table [api] is set twice, first at line 1; leave one of the two",
    ),
    mistake(
        'use = ["appliance"]',
        'use ["appliance"]',
        '11: (file): use has no = behind it; write use = ["appliance"]',
    ),
    mistake(
        'dtype = "float32"',
        'dtype = "float32',
        "17: (file): a quotation mark is missing; put text between two of them",
    ),
    mistake(
        'dtype = "float32"',
        "pin = yes",
        "17: model[0].pin: yes is not a value of TOML; write pin = true",
    ),
    mistake(
        'dtype = "float32"',
        "tool_parser = None",
        '17: model[0].tool_parser: None is not a value of TOML; write tool_parser = ""',
    ),
    mistake(
        'dtype = "float32"',
        "verify: true",
        "17: (file): verify has no = behind it; write verify = true",
    ),
]


@pytest.mark.parametrize(("right", "wrong", "messages"), MISTAKES)
def test_a_mistake(folder: Path, right: str, wrong: str, messages: tuple[str, ...]) -> None:
    """Each problem, to the letter; paths in messages are absolute."""
    assert GOOD.count(right) == 1
    file = folder / "appliance.toml"
    file.write_text(GOOD.replace(right, wrong), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    told = [str(problem) for problem in refused.value.problems]

    prefix = f"{file}:"
    assert all(line.startswith(prefix) for line in told)
    short = [line.removeprefix(prefix).replace(f"{folder}/", "") for line in told]
    assert short == list(messages)


def test_what_is_right_is_accepted(folder: Path) -> None:
    """Else every mistake would be found."""
    file = folder / "appliance.toml"
    file.write_text(GOOD, encoding="utf-8")

    assert [model.name for model in load_config(file).models] == ["tiny"]


def test_every_table_has_mistakes() -> None:
    """Of each part of the schema."""
    keys = [message.split(": ")[1] for row in MISTAKES for message in row.values[2]]  # type: ignore[attr-defined]

    for header in schema():
        table = header.strip("[]")
        assert any(key.startswith((f"{table}.", f"{table}[")) for key in keys), header
