"""The endpoint of an admin who asks what keys used, from the ledger."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from litestar import Request, get
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from appliance.access.auth import Access, renewal_of
from appliance.http.errors import ApiError, BadRequest
from appliance.http.json import json_answer
from appliance.usage.entries import DAY_SECONDS, date_of, month_of
from appliance.usage.ledger import Ledger
from appliance.usage.report import (
    ReportRefused,
    UsageRow,
    as_csv,
    bound_day,
    grouped_by,
    report,
)

FORMATS: Final = ("json", "csv")


class KeyBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The budget of a key that has one, and what is spent of it in this month (UTC)."""

    key: str
    tokens_per_month: int
    spent_tokens: int
    renews: str
    """``2026-12-01``"""


class OrganizationBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The budget of an organization that has one, and what its keys have spent of it."""

    organization: str
    tokens_per_month: int
    spent_tokens: int
    renews: str


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``GET /api/usage``. The days are in UTC, and both are included."""

    by: tuple[str, ...]
    since: str | None
    """None: as far back as the ledger goes."""
    until: str
    rows: list[UsageRow]
    total: UsageRow | None
    """None if there are no rows."""
    budgets: list[KeyBudget]
    organization_budgets: list[OrganizationBudget]


def usage_routes(ledger: Ledger | None, access: Access) -> list[HTTPRouteHandler]:
    """Where no ledger is kept, they say so."""

    @get("/api/usage", operation_id="usage")
    async def usage(request: Request[Any, Any, Any]) -> ASGIResponse:
        if ledger is None:
            message = (
                "this appliance keeps no ledger: usage.directory is not set; "
                'add directory = "usage" to [usage], and restart it'
            )
            raise ApiError(404, message, code="not_configured")
        asked, now = request.query_params, access.wall_clock()
        form = asked.get("format", "json")
        if form not in FORMATS:
            raise BadRequest(f"format: {form[:40]!r} is neither json nor csv", "format")
        try:
            by = grouped_by(asked.get("by", "key,model"))
            since = bound_day("since", asked["since"], now) if "since" in asked else None
            until = bound_day("until", asked["until"], now) if "until" in asked else None
        except ReportRefused as error:
            raise BadRequest(str(error), error.field) from error
        # Up to seconds for all rows that a ledger may have.
        cells = list(ledger.books.rows())
        rows = await asyncio.to_thread(report, cells, by, since, until)
        if form == "csv":
            headers = {"content-disposition": 'attachment; filename="usage.csv"'}
            return ASGIResponse(
                body=as_csv(by, rows).encode(), media_type="text/csv", headers=headers
            )
        total = await asyncio.to_thread(report, cells, (), since, until)
        return json_answer(
            Usage(
                by=by,
                since=None if since is None else date_of(since),
                until=date_of(int(now // DAY_SECONDS) if until is None else until),
                rows=rows,
                total=total[0] if total else None,
                budgets=_budgets(ledger, access, now),
                organization_budgets=_organization_budgets(ledger, access, now),
            )
        )

    return [usage]


def _budgets(ledger: Ledger, access: Access, now: float) -> list[KeyBudget]:
    month, renews = month_of(now), f"{renewal_of(now):%Y-%m-%d}"
    return [
        KeyBudget(
            key=key.name,
            tokens_per_month=key.tokens_per_month,
            spent_tokens=ledger.spent_tokens(key.name, month),
            renews=renews,
        )
        for key in (() if access.keys is None else access.keys.all())
        if key.tokens_per_month is not None
    ]


def _organization_budgets(ledger: Ledger, access: Access, now: float) -> list[OrganizationBudget]:
    month, renews = month_of(now), f"{renewal_of(now):%Y-%m-%d}"
    return [
        OrganizationBudget(
            organization=each.name,
            tokens_per_month=each.tokens_per_month,
            spent_tokens=ledger.spent_tokens_of(each.name, month),
            renews=renews,
        )
        for each in (() if access.keys is None else access.keys.organizations())
        if each.tokens_per_month is not None
    ]
