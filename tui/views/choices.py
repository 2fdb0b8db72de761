"""A choice of policies in words: who is asked in which order, and with which parameters."""

from __future__ import annotations

from tui.messages import Document


def keys_of(choice: Document) -> dict[str, str]:
    """A choice as keys and values: what is asked in order, decisions, parameters."""
    keys = {"use": ", ".join(choice["use"])}
    keys |= {f"decision {hook}": name for hook, name in sorted(choice["decisions"].items())}
    return keys | flat(choice["parameters"])


def flat(parameters: Document) -> dict[str, str]:
    """Parameters of policies by one key each."""
    return {
        f"{name}.{field}": str(value)
        for name, table in sorted(parameters.items())
        for field, value in sorted(table.items())
    }


def written(pairs: Document) -> str:
    """As a field of a form has them."""
    return ",".join(f"{name}={value}" for name, value in pairs.items())


def in_a_line(choice: Document) -> str:
    """All of a choice."""
    pairs = sorted(choice["decisions"].items()) + list(flat(choice["parameters"]).items())
    return " ".join(["+".join(choice["use"]), *(f"{name}={value}" for name, value in pairs)])
