"""``appliance lab calibrate``: tables in, fits and their quality out."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from appliance.cli.main import cli
from appliance.errors import LabError
from appliance.lab import hardware
from appliance.lab.calibration.fit_profiles import LEAST_ROWS
from appliance.lab.calibration.step_tables import read_tables
from tests.unit.lab.test_journal_workload import write as write_journal

MODELS = "model,layers,hidden,kv_bytes_per_token_16bit,params_computed\nTiny-1B,16,2048,32768,{}\n"


def invoke(*arguments: str | Path) -> Result:
    words = [str(argument) for argument in ("lab", "calibrate", *arguments)]
    return CliRunner().invoke(cli, words, catch_exceptions=False)


def first_steps(path: Path, noise: float = 0.01) -> Path:
    """A table of whole-model steps by a known law: prompts 20 ms and 0.1 ms a token past 128, steps
    10 ms, 0.1 ms a request and 20 ns a KV token; rows that are not valid are absurd."""
    scatter = np.random.default_rng(5)
    with gzip.open(path, "wt", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(
            [
                *("model", "gpu", "tp", "input_len", "batch_size"),
                *("prefill_ms", "decode_ms", "valid_prefill", "valid_decode"),
            ]
        )
        for length in (16, 64, 256, 1024):
            for n in (1, 2, 4, 8, 16, 32, 50, 70, 100, 140, 200):
                valid = int(length * n <= 4096)
                prefill = 20 + 0.1 * max(0, length * n - 128) if valid else 1e6
                decode = 10 + 0.1 * n + 2e-5 * (length + 5) * n if valid else 1e6
                by = 1 + noise * scatter.standard_normal(2)
                row = ["Tiny-1B", "A100", 1, length, n, prefill * by[0], decode * by[1]]
                lines.writerow([*row, valid, valid])
    return path


def sizes(path: Path, parameters: int = 10**9) -> Path:
    path.write_text(MODELS.format(parameters))
    return path


def test_a_table_becomes_a_profile(tmp_path: Path) -> None:
    """Its law, its range, and figures of rows that were held out; the built-in table reads it."""
    table = first_steps(tmp_path / "steps.csv.gz")
    models = sizes(tmp_path / "models.csv")
    written, report = tmp_path / "profiles.csv", tmp_path / "fits.json"

    result = invoke(table, "--models", models, "--json", report, "--write", written)

    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    [header, row] = result.stdout.splitlines()
    assert header.split()[:4] == ["SOURCE", "MODEL", "GPU", "TP"]
    assert row.split()[:4] == ["steps", "Tiny-1B", "A100", "1"]
    [line] = csv.DictReader(io.StringIO(written.read_text()))
    made = hardware.profile_of(line)
    assert made.weight_bytes == 2 * 10**9
    assert made.measured == hardware.Measured(prompt_tokens=4096, requests=200, kv_tokens=4200)
    assert made.prefill_seconds(1000) == pytest.approx(0.02 + 0.0001 * 872, rel=0.05)
    assert made.step_seconds(40, 3000) == pytest.approx(0.010 + 0.004 + 0.00006, rel=0.05)
    [found] = json.loads(report.read_text())["fits"]
    assert found["prefill"]["held_out"] == found["prefill"]["rows"] == 26
    assert found["prefill"]["r2"] > 0.97
    assert found["step"]["r2"] > 0.95
    assert found["step"]["ranges"]["requests"] == {"least": 1, "most": 200}
    assert found["misses"] == []


def test_a_bound_that_is_missed_is_named(tmp_path: Path) -> None:
    """With what its rows allow, and exit status 1; unless less is asked for."""
    table = first_steps(tmp_path / "steps.csv.gz", noise=0.5)

    result = invoke(table)

    assert result.exit_code == 1
    assert "Tiny-1B on A100 tp=1 (steps): R² of prefill is" in result.stderr
    assert "a rising curve through these very rows" in result.stderr
    assert " !" in result.stdout
    assert invoke(table, "--min-r2", "-9", "-9").exit_code == 0


def test_a_model_without_sizes_is_no_profile(tmp_path: Path) -> None:
    """It is fitted all the same."""
    written = tmp_path / "profiles.csv"

    result = invoke(first_steps(tmp_path / "steps.csv.gz"), "--write", written)

    assert result.exit_code == 0
    assert "Tiny-1B on A100 tp=1 (steps): no profile: its sizes are not known" in result.stderr
    assert len(written.read_text().splitlines()) == 1


def derived(directory: Path, gpu: str = "A100") -> list[Path]:
    """Tables of prompts, steps and mixed steps, by a law: 5 ms, 0.05 ms a token of a prompt, 20 ns
    a KV token."""
    prompts = directory / "prompts.csv"
    prompts.write_text("source,model,gpu,tp,num_tokens,total_ms\n")
    steps = directory / "steps.csv"
    steps.write_text("source,model,gpu,tp,batch_size,kv_tokens,total_ms\n")
    mixed = directory / "mixed.csv"
    mixed.write_text(
        "source,model,gpu,tp,chunk_tokens,chunk_history,decode_batch,decode_kv_len,total_ms\n"
    )
    key = f"kernels,tiny 1b,{gpu},1"
    with prompts.open("a") as file:
        file.writelines(f"{key},{t},{5 + 0.05 * t}\n" for t in (16, 64, 256, 512, 1024, 2048, 4096))
        file.write(f"{key},8192,{5 + 0.05 * 8192}\n")
    with steps.open("a") as file:
        file.writelines(
            f"{key},{n},{n * kv},{5 + 2e-5 * n * kv}\n"
            for n in (1, 8, 64)
            for kv in (128, 512, 4096)
        )
    with mixed.open("a") as file:
        file.writelines(
            f"{key},{chunk},0,8,512,{5 + 1.3 * 2e-5 * 8 * 512 + 0.05 * chunk}\n"
            for chunk in (0, 128, 512)
        )
    return [prompts, steps, mixed]


def test_tables_of_the_same_source_belong_together(tmp_path: Path) -> None:
    """Prompts and steps make one fit; mixed steps check it; a model may be spelled otherwise."""
    report = tmp_path / "fits.json"

    result = invoke(
        *derived(tmp_path), "--models", sizes(tmp_path / "models.csv"), "--json", report
    )

    assert result.exit_code == 0, result.output
    [found] = json.loads(report.read_text())["fits"]
    assert (found["source"], found["model"]) == ("kernels", "Tiny-1B")
    assert found["mixed_rows"] == 3
    assert found["mixed_r2"] == pytest.approx(1.0, abs=1e-3)


def test_rows_that_no_box_can_show_are_left_out(tmp_path: Path) -> None:
    """40 billion parameters leave room for few tokens on an A100, and for no step at all twice."""
    tables, report = derived(tmp_path), tmp_path / "fits.json"

    invoke(*tables, "--models", sizes(tmp_path / "m.csv", 40 * 10**9), "--json", report)
    [tight] = json.loads(report.read_text())["fits"]
    invoke(*tables, "--models", sizes(tmp_path / "m.csv", 80 * 10**9), "--json", report)
    [none] = json.loads(report.read_text())["fits"]

    assert (tight["step"]["rows"], tight["step"]["left_out"]) == (8, 1)
    assert none["step"] is None


def test_a_gpu_that_is_unknown_is_fitted_all_the_same(tmp_path: Path) -> None:
    """Nothing is known of its memory."""
    report = tmp_path / "fits.json"

    invoke(*derived(tmp_path, "abacus"), "--json", report)

    [found] = json.loads(report.read_text())["fits"]
    assert (found["gpu"], found["step"]["left_out"]) == ("abacus", 0)


def test_whole_generations_are_read(tmp_path: Path) -> None:
    """A step is taken in the middle of the output."""
    table = tmp_path / "whole.csv"
    table.write_text(
        "model,gpu,tp,prompt_tokens,batch_size,output_tokens,prompt_ms,token_ms\n"
        "llama2-70b,a100-80gb,2,128,4,100,80.0,50.0\n"
    )

    [(key, rows)] = read_tables([table]).items()

    assert key == ("whole", "llama2-70b", "a100-80gb", 2)
    assert rows.prompts == [(512.0, 128.0 * 512, 4.0, pytest.approx(0.08))]
    assert rows.steps == [(4.0, 178.0 * 4, pytest.approx(0.05))]


def test_a_journal_is_calibrated(tmp_path: Path) -> None:
    """By its own prompts and turns, where there are enough of them."""
    write_journal(tmp_path / "journal.jsonl")
    report = tmp_path / "fits.json"

    result = invoke(tmp_path / "journal.jsonl", "--min-r2", "-9", "-9", "--json", report)

    assert result.exit_code == 0, result.output
    found = json.loads(report.read_text())["fits"]
    assert {one["source"] for one in found} == {"journal"}
    assert {one["gpu"] for one in found} == {"recorded"}
    assert all(one["prefill"]["r2"] > 0.97 for one in found)
    steps = [one["step"] for one in found]
    assert None in steps
    assert all(step["rows"] >= LEAST_ROWS for step in steps if step is not None)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a,b\n1,2\n", "not a table of steps: its columns are a, b"),
        ("model,gpu,tp,num_tokens,total_ms\nm,g,1,16,-3\n", "bad.csv:2: -3 ms is no time"),
        ("model,gpu,tp,num_tokens,total_ms\nm,g,1,many,3\n", "bad.csv:2: could not convert"),
        ("model,gpu,tp,num_tokens,total_ms\nm,g,1\n", "bad.csv:2: "),
    ],
)
def test_what_is_no_table_is_named(tmp_path: Path, text: str, what: str) -> None:
    """With its line."""
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(LabError, match=what):
        read_tables([path])


def test_mistakes_of_the_command_are_named(tmp_path: Path) -> None:
    """A table that is no table, models that are none, a journal that is none: exit status 2."""
    bad = tmp_path / "bad.csv"
    bad.write_text("a\n1\n")
    table = first_steps(tmp_path / "steps.csv.gz")
    for arguments in [(bad,), (table, "--models", bad), (sizes(tmp_path / "journal.jsonl"),)]:
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")


def test_the_built_in_profiles_are_sane() -> None:
    """No time of theirs shrinks with more to do; KV is read at the memory's rate at best, and at
    half of it at worst; how far measurements went is known."""
    for key in hardware.profiled():
        found = hardware.profile(*key)
        rate = found.tp * hardware.gpu(key[1]).memory_bytes_per_second
        share = found.kv_bytes_per_token / rate / found.step_seconds_per_kv_token
        assert 0.4999 < share < 1.0001
        assert found.measured is not None
        assert found.measured.requests >= 120
        assert found.prefill_seconds(1) > 0
        prompts = [found.prefill_seconds(tokens) for tokens in range(1, 9000, 500)]
        batches = [found.step_seconds(n, 1000 * n) for n in range(1, 257)]
        assert prompts == sorted(prompts)
        assert batches == sorted(batches)
