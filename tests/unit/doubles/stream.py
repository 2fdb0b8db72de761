"""A stream without threads, whose transfers end when the test, or who waits for them, says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from appliance.memory.streams import Copy
from appliance.memory.transfers import Transfer, TransferCancelled


class StreamDouble:
    """Ends transfers at once, or when a caller waits for them while `held`. Times are zero.

    `fail_next` is what the next transfer fails with.
    """

    def __init__(self) -> None:
        self.held = False
        self.fail_next: BaseException | None = None
        self.line: list[Transfer] = []

    def run(
        self,
        transfer: Transfer,
        copies: Iterable[Copy],
        *,
        after: Sequence[Transfer] = (),
        needs: Sequence[Transfer] = (),
    ) -> None:
        error, self.fail_next = self.fail_next, None
        self.line.append(transfer)
        wait, join = transfer.wait, transfer.join

        def wait_ending(nbytes: int | None = None) -> None:
            self._end(transfer, error)
            wait(nbytes)

        def join_ending() -> None:
            self._end(transfer, error)
            join()

        transfer.wait, transfer.join = wait_ending, join_ending  # type: ignore[method-assign]
        if not self.held:
            self._end(transfer, error)

    def end_all(self) -> None:
        """Everything under way is over."""
        for transfer in list(self.line):
            transfer.join()

    def close(self) -> None:
        self.end_all()

    def _end(self, transfer: Transfer, error: BaseException | None) -> None:
        if transfer not in self.line:
            return
        self.line.remove(transfer)
        transfer.begin(transfer.queued)
        if transfer.cancelled:
            error = TransferCancelled("it is not wanted any more")
        if error is None:
            transfer.finish(transfer.queued)
        else:
            transfer.fail(error, transfer.queued)
