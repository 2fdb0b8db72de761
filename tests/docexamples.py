"""Examples of requests in documents: commands, and the answers that are shown behind them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from appliance.service.front_paths import is_front_path
from tests.docblocks import Block

ADDRESS: Final = "http://127.0.0.1:11500"
_STRICT: Final = 'curl() { command curl --silent --show-error --fail-with-body "$@"; }\n'


class Example(NamedTuple):
    """A command, and the answer that the page shows behind it, if it does."""

    command: str
    kind: str
    shown: str

    @property
    def of_front_ends(self) -> bool:
        """Whether front ends answer it, and not the core."""
        paths = re.findall(rf"{ADDRESS}(/[^\s'\"?]*)", self.command)
        return all(is_front_path(path) for path in paths)

    def script(self, url: str) -> str:
        """For bash; it fails if a request does."""
        return _STRICT + self.command.replace(ADDRESS, url)


def examples(blocks: Iterable[Block]) -> Iterator[Example]:
    """Those of blocks of commands and answers, in order."""
    command = ""
    for block in blocks:
        if block.language != "sh":
            yield Example(command, block.language, block.text)
            command = ""
            continue
        if command:
            yield Example(command, "", "")
        command = block.text
    if command:
        yield Example(command, "", "")


def shape(value: Any) -> Any:
    """Names and kinds of values, without the values; of a list, that of its first item."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


def told(shown: str, said: str) -> bool:
    """Whether the lines that are shown, up to their JSON, are in `said`, in this order."""
    lines = iter([line.partition("{")[0] for line in said.splitlines()])
    return all(line.partition("{")[0] in lines for line in shown.splitlines())
