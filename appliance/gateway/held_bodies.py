"""What the core keeps of live requests besides their prompts: images, which take megabytes, and
lists of tokens.

All together have a bound, and so has what one key's requests, or all of those without a key, take
of it: the core and the workers keep it until the request is over.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from appliance.http.errors import ApiError
from appliance.vocabulary import RequestId

MAX_BYTES: Final = 512 << 20
OWNER_SHARE: Final = 0.75
FREE_BYTES: Final = 64 * 1024
"""Of a request that are not counted: so much any of them may have."""


class TooMuchHeld(ApiError):
    """429: what this request sends besides text does not fit next to that of others."""

    def __init__(self) -> None:
        super().__init__(
            429,
            "images and lists of tokens (such as logit_bias) of requests that are under way take "
            "all memory that they may have; try again when some are answered",
            code="too_much_held",
            headers={"Retry-After": "1"},
        )


class HeldBodies:
    """The bytes of live requests."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._of_owner: Counter[str] = Counter()
        self._requests: dict[RequestId, tuple[str, int]] = {}

    @property
    def size_bytes(self) -> int:
        """Of all."""
        return self._of_owner.total()

    def take(self, request: RequestId, owner: str, size_bytes: int) -> None:
        """Count a request. Raises `TooMuchHeld`."""
        size = size_bytes - FREE_BYTES
        if size <= 0:
            return
        most = int(OWNER_SHARE * self._max_bytes)
        if self.size_bytes + size > self._max_bytes or self._of_owner[owner] + size > most:
            raise TooMuchHeld
        self._of_owner[owner] += size
        self._requests[request] = owner, size

    def release(self, request: RequestId) -> None:
        """The request is over, or was not taken in."""
        owner, size = self._requests.pop(request, ("", 0))
        self._of_owner[owner] -= size
        if not self._of_owner[owner]:
            del self._of_owner[owner]
