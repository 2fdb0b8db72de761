"""Keys: who may ask the appliance what, and how much; keys are made and revoked here."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from tui.asking import Ask
from tui.drawing.amounts import duration, rate
from tui.drawing.canvas import Line
from tui.drawing.table import Column, TableView, member
from tui.messages import DaemonRefused, DaemonSource, Document
from tui.view import Action, Field, Given, Secret, ViewContext, details

PATH = "/api/keys"
SOON_SECONDS = 24 * 3600.0
"""Before the end of a key."""
BOTH = ["interactive", "batch"]
BOUNDS = {
    "requests_per_minute": "{} req/m", "tokens_per_minute": "{} tok/m", "concurrency": "{} at once",
}  # fmt: skip


def _models(key: str, row: Document, context: ViewContext) -> str:
    first, *others = row["models"] or ["all"]
    return f"{first} +{len(others)}" if others else str(first)


def _classes(key: str, row: Document, context: ViewContext) -> str:
    return "both" if row["classes"] == BOTH else ",".join(row["classes"])


def _limits(key: str, row: Document, context: ViewContext) -> str:
    return ", ".join(
        words.format(rate(row[name])) for name, words in BOUNDS.items() if row[name] is not None
    )


def _left(key: str, row: Document, context: ViewContext) -> float | None:
    """Until it expires; nothing if it never does."""
    end: float | None = row["expires_unix_seconds"]
    return None if end is None else end - context.now


def _until(left: float | None) -> str:
    if left is None:
        return "never"
    return "expired" if left <= 0 else duration(left)


def _until_style(left: float | None, context: ViewContext) -> str:
    theme = context.theme
    return theme.dim if left is None else theme.warn if left < SOON_SECONDS else ""


def _had(name: str) -> Any:
    """A field of its use; None if no client has presented the key yet."""
    return lambda key, row, context: (row["use"] or {}).get(name)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def wanted(given: Given) -> Document:
    """What was given as the daemon wants it. Raises `DaemonRefused` for what it could not read."""
    body: Document = {
        name: given[name] for name in ("name", "expires", "organization") if name in given
    }
    body |= {name: _words(given[name]) for name in ("scopes", "models", "classes") if name in given}
    if (slo := given.get("slo")) is not None:
        if slo not in ("yes", "no"):
            raise DaemonRefused(f"slo: yes or no, not {slo!r}")
        body["slo"] = slo == "yes"
    if (guides := given.get("guides")) is not None:
        if guides not in ("yes", "no"):
            raise DaemonRefused(f"guides: yes or no, not {guides!r}")
        body["guides"] = guides == "yes"
    for name in BOUNDS:
        if (count := given.get(name)) is not None:
            if not count.isdecimal():
                raise DaemonRefused(f"{name}: a whole number, such as 60, not {count!r}")
            body[name] = int(count)
    return body


async def _create(source: DaemonSource, key: str, given: Given) -> Secret:
    made = await source.ask("POST", PATH, wanted(given))
    return Secret(f"{made['name']} is made", f"the key {made['name']}", made["key"])


async def _revoke(source: DaemonSource, key: str, given: Given) -> str:
    answer = await source.ask("DELETE", f"{PATH}/{quote(key)}")
    if answer["admin_keys"]:
        return f"{key} is revoked"
    return f"{key} is revoked; no key of the scope admin is left, operators have the admin socket"


class KeysView(TableView):
    """In the order in which they were made, unless they are sorted. No secret is among them."""

    title = "Keys"
    ended = "revoked"
    names = ("keys", "key", "k")
    asks = (Ask("GET", PATH, 5.0),)
    columns = (
        Column("NAME", lambda key, row, context: key),
        Column("SCOPES", lambda key, row, context: ",".join(row["scopes"]),
               style=lambda value, context: context.theme.accent if "admin" in value else ""),
        Column("MODELS", _models),
        Column("CLASSES", _classes),
        Column("EXPIRES", _left, _until, _until_style, right=True),
        Column("AGE", lambda key, row, context: max(0.0, context.now - row["created_unix_seconds"]),
               duration, right=True),
        Column("LIMITS", _limits),
        Column("LIVE", _had("live"), right=True),
        Column("REQUESTS", _had("requests"), right=True),
        Column("REFUSED", _had("refusals"), right=True,
               style=lambda value, context: context.theme.warn if value else ""),
        Column("PROMPTS", _had("prompt_tokens"), right=True),
        Column("TOKENS", _had("output_tokens"), right=True),
        Column("SLO", member("slo"), lambda value: "yes" if value else "no"),
        Column("GUIDES", member("guides"), lambda value: "no" if value is False else "yes"),
        Column("ORGANIZATION", member("organization")),
    )  # fmt: skip
    actions = (
        Action("c", "create", "make a key; it is shown once", _create, each_row=False,
               left_empty="does not bind", fields=(
            Field("name", "letters, digits and ._@-"),
            Field("scopes", "infer, observe or admin, such as infer,admin; infer if left empty"),
            Field("models", "the only ones it knows, such as llama-a,qwen-a"),
            Field("classes", "interactive or batch, if not both"),
            Field("slo", "yes, if its requests may name a service level"),
            Field("guides", "no, if its answers may follow no schemas or grammars"),
            Field("expires", "after so long, such as 30d, 12h or 90m"),
            Field("requests_per_minute", "at most, such as 60"),
            Field("tokens_per_minute", "prompts and answers together"),
            Field("concurrency", "requests at once"),
            Field("organization", "whose limits hold as well"),
        )),
        Action("K", "revoke", "take keys back, for good", _revoke,
               "Revoke {}? The next request is refused, for good; what runs goes on."),
    )  # fmt: skip

    def rows(self, context: ViewContext) -> dict[str, Document]:
        listed = context.state.answer(PATH).document or {}
        return {row["name"]: row for row in listed.get("keys", ())}

    def nothing(self, context: ViewContext) -> str:
        answer = context.state.answer(PATH)
        return answer.refused or ("asking …" if answer.document is None else "there are none")

    def faded(self, key: str, row: Document, context: ViewContext) -> bool:
        """One that has expired is good for nothing."""
        left = _left(key, row, context)
        return left is not None and left <= 0

    def detail(self, key: str, context: ViewContext) -> list[Line] | None:
        row = self.rows(context).get(key)
        if row is None:
            return None
        told_otherwise = ("created_unix_seconds", "expires_unix_seconds", "expired")
        shown = {name: value for name, value in row.items() if name not in told_otherwise}
        age = duration(max(0.0, context.now - row["created_unix_seconds"]))
        shown |= {
            "models": row["models"] or "all",
            "use": row["use"] or "none since the daemon began",
        }
        shown |= {"created": f"{age} ago", "expires in": _until(_left(key, row, context))}
        return details(shown, context.theme)

    def path(self, key: str) -> str | None:
        return f"{PATH}/{quote(key)}"
