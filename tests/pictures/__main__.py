"""``python -m tests.pictures [FOLDER]``: writes `docs/images`, or the same into a folder."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.pictures.files import FOLDER, pictures


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawn in asyncio.run(pictures()).items():
        (folder / name).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else FOLDER)
