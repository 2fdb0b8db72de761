"""Lists in pages, as OpenAI has them: `after` an id, at most `limit` items."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from litestar import Request

from appliance.http.errors import BadRequest, Unsupported


class Named(Protocol):
    """What has an id."""

    @property
    def id(self) -> str: ...


_Item = TypeVar("_Item", bound=Named)


class PageItems(NamedTuple, Generic[_Item]):
    """Some of a list, and whether there are more behind them."""

    items: Sequence[_Item]
    more: bool


class Page(msgspec.Struct, kw_only=True):
    """The body of an answer that lists."""

    object: str = "list"
    data: Sequence[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, items: Sequence[Named], more: bool) -> Page:
        """`items` as the answer has them."""
        first, last = (items[0].id, items[-1].id) if items else (None, None)
        return cls(data=items, first_id=first, last_id=last, has_more=more)


def query_of(request: Request[Any, Any, Any], known: Collection[str]) -> dict[str, str]:
    """What the query says, each once. Raises `Unsupported` for what is not `known`."""
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise Unsupported(name[:100])
        found[name] = value
    return found


def page_of(
    items: Sequence[_Item], query: Mapping[str, str], *, default: int, most: int
) -> PageItems[_Item]:
    """The part of `items` that a query asks for. Raises `BadRequest`."""
    limit = query.get("limit", str(default))
    digits = limit.isascii() and limit.isdigit() and len(limit) <= 9
    if not (digits and 1 <= int(limit) <= most):
        raise BadRequest(f"limit: a number from 1 to {most}", "limit")
    first = 0
    if "after" in query:
        ids = [item.id for item in items]
        if query["after"] not in ids:
            raise BadRequest("after: no such id in this list", "after")
        first = ids.index(query["after"]) + 1
    last = first + int(limit)
    return PageItems(items[first:last], last < len(items))
