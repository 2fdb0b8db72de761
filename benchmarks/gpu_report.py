"""The headline figures of a borrowed GPU, as the table of `docs/results.md`.

    python -m benchmarks.gpu_report FILE...

The files are what sections of `benchmarks.gpu_lease` have measured. A figure that is not in a file,
or is of the pretend driver, has no row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple


class Figure(NamedTuple):
    """A figure: what it says, the keys (and places in lists) that lead to it, and its form."""

    what: str
    keys: tuple[str | int, ...]
    form: str
    scale: float = 1.0


FIGURES: Final = (
    Figure("copies to the device", ("ceilings", "h2d_bytes_per_second"), "{:.1f} GB/s", 1e-9),
    Figure("copies to the host", ("ceilings", "d2h_bytes_per_second"), "{:.1f} GB/s", 1e-9),
    Figure(
        "a switch of the last model (random bytes), mapped while it is copied and without "
        "unmapping, over its copy at that rate",
        ("switches", -1, "pipelined_over_bound"),
        "{:.2f}",
    ),
    Figure(
        "a switch to a model that was prefetched, over one that was not",
        ("switches", -1, "prefetched_over_cold"),
        "{:.3f}",
    ),
    Figure(
        "steps while another model's weights are copied, over steps alone",
        ("overlap", "compute_beside_copy_over_alone"),
        "{:.3f}",
    ),
    Figure("engines in turns: tokens equal to stock vLLM's", ("tokens_identical",), "{}"),
    Figure(
        "engines in turns: a switch over its copy, median, without unmapping and mapping",
        ("switch_over_copy_bound", "p50"),
        "{:.2f}",
    ),
    Figure("engines in turns: TBT, median", ("tbt_cdf_ms", "p50"), "{:.1f} ms"),
    Figure("encoded weights are decoded at", ("gpu", "decode_gbytes_per_second"), "{:.1f} GB/s"),
    Figure(
        "a switch with encoded weights, over one with plain ones",
        ("gpu", "switch_encoded_over_plain"),
        "{:.2f}",
    ),
    Figure("the daemon: chats through its API", ("chats",), "{}"),
    Figure("of these with the tokens of plain vLLM", ("identical",), "{}"),
    Figure("the daemon: TTFT, median", ("rounds", -1, "ttft_seconds", "p50"), "{:.2f} s"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    print("\n".join(table(parser.parse_args().files)))


def table(files: Sequence[Path]) -> Iterator[str]:
    """Lines of Markdown, in the order of the files."""
    yield "| what | measured | on | file |"
    yield "|---|---|---|---|"
    for file in files:
        told = json.loads(file.read_text())
        if "rehearsal" in told:
            continue
        for figure in FIGURES:
            value = found(told, figure.keys)
            if isinstance(value, int | float):
                yield (
                    f"| {figure.what} | {said(value, figure)} | {device(told)}, revision "
                    f"{told['commit']} | `{file.name}` |"
                )


def device(told: Mapping[str, Any]) -> str:
    """The GPU's name, wherever a benchmark has it. Raises `KeyError` if it has none."""
    gpu = told.get("gpu")
    return str(gpu if isinstance(gpu, str) else gpu["device"] if gpu else told["device"])


def said(value: float, figure: Figure) -> str:
    if isinstance(value, bool):
        return "all" if value else "not all"
    return figure.form.format(value * figure.scale if figure.scale != 1 else value)


def found(told: Any, keys: Sequence[str | int]) -> Any:
    """What the keys lead to; None if they lead nowhere."""
    for key in keys:
        if isinstance(key, int) and isinstance(told, list) and told:
            told = told[key]
        elif isinstance(key, str) and isinstance(told, Mapping):
            told = told.get(key)
        else:
            return None
    return told


if __name__ == "__main__":
    main()
