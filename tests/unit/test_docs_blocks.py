"""Every block of code in our documents is run by a test, is checked, or says why it is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.docblocks import Block, blocks_of, code_blocks, pages, read_blocks, taken
from tests.docchecks import REMEDY, check

BLOCKS = [block for page in pages() for block in blocks_of(page)]


def kind(block: Block) -> str:
    """How it is known to be right."""
    if block.place in taken():
        return "run"
    return "checked" if block.reason is None else "marked"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_is_run_or_checked_or_says_why_not(block: Block) -> None:
    match kind(block):
        case "run":
            assert block.reason is None, f"{taken()[block.place]} runs it: take the comment away"
        case "checked":
            check(block)
        case _:
            assert block.reason, f"{block.place}: say why, as in <!-- not run: reason -->"


def test_most_blocks_are_run(record_testsuite_property: Callable[[str, object], None]) -> None:
    """The report has how many there are of each kind."""
    counts = Counter(map(kind, BLOCKS))
    for name, count in counts.items():
        record_testsuite_property(f"blocks that are {name}", count)

    assert counts["run"] > counts["checked"] > counts["marked"] > 0


@pytest.mark.parametrize(
    ("language", "text", "wrong"),
    [
        ("", "make test", "it has no language"),
        ("cobol", "STOP RUN.", "nothing checks cobol"),
        ("toml", "[api]\nbynd = 1", "unknown key"),
        ("json", "{", "Expecting property name"),
        ("yaml", "a: [", "expected the node content"),
        ("python", "from appliance.units import humane", "has no humane"),
        ("python", "def f(", "was never closed"),
        ("mermaid", "graphic TD", "not a kind of diagram"),
        ("mermaid", 'xychart-beta\n x-axis ["a", "b"]\n bar [1]', "not one for each label"),
        ("sh", "appliance sevre my.toml", "there is no command sevre"),
        ("sh", "appliance serve my.toml --prot 1", "No such option"),
        ("sh", "sudo -u appliance appliance rm", "Missing argument"),
        ("sh", "X=1 appliance-engine policy ad mine.whl", "not in its usage"),
        ("sh", "appliance-engine install tpu", "not in its usage"),
        ("sh", "curl http://127.0.0.1:11500/api/statsu", "no endpoint GET /api/statsu"),
        ("sh", "curl http://127.0.0.1:11500/api/pull", "no endpoint GET /api/pull"),
        ("sh", "curl http://127.0.0.1/api/status", "no port 11500"),
        ("sh", "curl http://127.0.0.1:11500/tokenize -d '{'", "Expecting property name"),
        ("sh", "curl http://127.0.0.1:11500/tokenize -d '{\"prompts\": 1}'", "has no fields"),
        ("sh", "make tset", "no target tset"),
        ("sh", "true && systemctl restart aplliance", "no unit aplliance"),
        ("sh", "journalctl -u appliances", "no unit appliances"),
        ("sh", "pip install 'appliance[labs]'", "appliance[labs]"),
        ("sh", "pip install requests", "not a package of this project"),
        ("sh", "apt install ./appliance_0.0.9_amd64.deb", "not the package of version"),
        ("sh", "python benchmarks/nothing.py", "there is no benchmarks/nothing.py"),
        ("sh", "python -m tests.mutations --nothing", "has no --nothing"),
        ("sh", "python -m pytest tests/nothing", "there is no tests/nothing"),
        ("sh", "podman build -f Containerfile .", "no such file"),
        ("sh", "unknown --option", "unknown is not known"),
        ("sh", "if true", "syntax error"),
        ("console", "$ appliance version\n1.2.3", "no test compares what"),
    ],
)
def test_what_is_wrong_is_found(language: str, text: str, wrong: str) -> None:
    """With the place and what to do."""
    with pytest.raises(AssertionError) as failed:
        check(Block("page.md", 7, language, f"{text}\n", None))

    assert str(failed.value).startswith("page.md:7: ")
    assert wrong in str(failed.value)
    assert str(failed.value).endswith(REMEDY)


def test_the_comment_is_the_one_right_before() -> None:
    """It may be in a list; without a reason it is none."""
    text = (
        "<!-- not run: a drawing -->\n```text\na\n```\n\n<!-- another -->\n```sh\nb\n```\n"
        "- item\n\n  <!-- not run: -->\n  ~~~\n  c\n  ~~~\n\n"
        "<!-- not run: too far -->\n\nwords\n\n    d\n"
    )

    found = [(block.line, block.text, block.reason) for block in read_blocks("page.md", text)]

    assert found == [
        (2, "a\n", "a drawing"),
        (7, "b\n", None),
        (13, "c\n", ""),
        (21, "d\n", None),
    ]


def test_an_indented_command_is_found() -> None:
    (block,) = read_blocks("page.md", "words\n\n    $ sudo systemctl stop appliance\n")

    with pytest.raises(AssertionError, match="put it into a fence"):
        check(block)


def test_a_test_cannot_take_what_is_not_there() -> None:
    with pytest.raises(LookupError, match=r"README\.md has no block of sh with 'no such text'"):
        code_blocks("README.md", "sh", containing="no such text")
