"""The calls of a lease, what they leave out when they are resumed, and the table of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_lease
from benchmarks.gpu_report import table

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("call", gpu_lease.CALLS)
def test_a_call_of_a_lease_ends_in_time(call: str) -> None:
    assert sum(gpu_lease.SECTIONS[name].seconds for name in gpu_lease.CALLS[call]) < 540


def test_calls_have_all_that_is_for_a_gpu() -> None:
    called = [name for names in gpu_lease.CALLS.values() for name in names]
    smaller = {"codec-smoke", "pool-smoke", "serve-smoke"}
    for_pretence = {"driver", "ranks"}
    too_long = {"pool"}

    assert len(called) == len(set(called))
    assert set(called) == set(gpu_lease.SECTIONS) - smaller - for_pretence - too_long


def test_what_passed_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, out = tmp_path / "before", tmp_path / "out"
    before.mkdir()
    told = {"memory": {"status": 0}, "switch": {"status": None, "why": "ran longer"}}
    (before / "summary.json").write_text(json.dumps(told))
    ran: list[str] = []

    def run(name: str, *_: object, **__: object) -> dict[str, int]:
        ran.append(name)
        return {"status": 0}

    monkeypatch.setattr(gpu_lease, "run", run)
    monkeypatch.setattr(
        "sys.argv", ["gpu_lease", "--out", str(out), "--before", str(before), "--call", "A"]
    )
    with pytest.raises(SystemExit) as ended:
        gpu_lease.main()

    assert ended.value.code == 0
    assert ran == ["switch"]
    assert json.loads((out / "summary.json").read_text()) == {"switch": {"status": 0}}
    assert "memory: passed in an earlier call" in capsys.readouterr().out


def test_without_sections_the_calls_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_lease"])
    gpu_lease.main()

    shown = capsys.readouterr().out
    assert all(f"--call {call}\n" in shown for call in gpu_lease.CALLS)


def test_the_results_have_what_the_gpu_measured() -> None:
    results = ROOT / "benchmarks" / "results"
    files = [results / f"2026-11-26-h200-{name}.json" for name in ("switch", "pool")]

    assert "\n".join(table(files)) in (ROOT / "docs" / "results.md").read_text()


def test_a_rehearsal_has_no_figures(tmp_path: Path) -> None:
    told = tmp_path / "serve.json"
    told.write_text(json.dumps({"rehearsal": "none", "chats": 12, "commit": "0"}))

    assert list(table([told])) == list(table([]))


def test_the_report_names_the_gpu_wherever_a_benchmark_has_it(tmp_path: Path) -> None:
    told = tmp_path / "codec.json"
    gpu = {"device": "NVIDIA X", "decode_gbytes_per_second": 1.25}
    told.write_text(json.dumps({"gpu": gpu, "commit": "0"}))

    (row,) = list(table([told]))[2:]
    assert row.startswith("| encoded weights are decoded at | 1.2 GB/s | NVIDIA X, revision 0 |")
