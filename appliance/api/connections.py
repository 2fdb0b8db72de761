"""HTTP connections: when one is lost, every request on it hears of that.

uvicorn tells only the request that came last. With several sent at once (pipelining) the one that
is being answered is an earlier one, and would go on for nobody: a stream of events for ever.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


class Connection(HttpToolsProtocol):
    """Knows all its requests that are not answered yet."""

    unanswered: tuple[RequestResponseCycle, ...] = ()

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        waiting = [cycle for cycle in self.unanswered if not cycle.response_complete]
        if self.cycle is not before:
            waiting.append(self.cycle)
        self.unanswered = tuple(waiting)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in self.unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.unanswered = ()
