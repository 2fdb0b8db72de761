"""A check for schemathesis: a server's error is one that docs/api.md lists."""

from __future__ import annotations

import schemathesis

from tests.fuzz.documented import Answer, is_undocumented


@schemathesis.check
def documented_server_error(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """By its code and its status; schemathesis itself compares the status with the document."""
    answer = Answer(response.status_code, response.content)
    assert not is_undocumented(answer), f"{answer.status} is not documented: {answer.body!r}"
