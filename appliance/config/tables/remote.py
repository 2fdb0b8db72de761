"""The table of a model of another server: `[[model]]` with `remote` in place of `path`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from appliance.config.tables.section import Section
from appliance.units import Seconds
from appliance.vocabulary import MODEL_NAME


class Remote(Section, kw_only=True):
    """A model of another server, which has `remote` in place of `path`: see docs/fleet.md."""

    name: Annotated[
        str,
        Meta(
            pattern=MODEL_NAME,
            description="What clients call it here: letters, digits and any of `._:/-`.",
            examples=["llama-405b"],
        ),
    ]
    remote: Annotated[
        str,
        Meta(
            description="Address of a server with OpenAI's API: `http://HOST:PORT`, or with a path "
            "that ends before `/chat/completions`; without a path it is `/v1`.",
            examples=["http://192.0.2.9:8000"],
        ),
    ]
    max_context: Annotated[
        int,
        Meta(
            ge=1,
            description="Longest prompt and answer together, tokens, as that server has it. Lists "
            "show it, and a request without `max_tokens` reserves so many of its key's limits.",
            examples=[131072],
        ),
    ]
    remote_model: Annotated[str, Meta(description='What that server calls it; "" for `name`.')] = ""
    remote_key_file: Annotated[
        str,
        Meta(
            description="File with the API key that the server wants, alone on its first line, "
            'relative to this file; mode 0600. "" for none. Read at the start and by a reload.'
        ),
    ] = ""
    remote_connect_timeout: Annotated[
        Seconds, Meta(description="Longest time for a connection to the server.")
    ] = Seconds(5)
    remote_timeout: Annotated[
        Seconds,
        Meta(description="Longest silence of the server, before an answer begins and within it."),
    ] = Seconds(300)
    aliases: Annotated[
        tuple[Annotated[str, Meta(pattern=MODEL_NAME)], ...],
        Meta(description="Further names that clients may call it."),
    ] = ()
    task: Annotated[
        Literal["generate", "embed"],
        Meta(description="What it is for: text (`generate`), or vectors (`embed`)."),
    ] = "generate"
    max_queue: Annotated[
        int, Meta(ge=1, description="Its requests at once; one more gets 429.")
    ] = 256
    enabled: Annotated[bool, Meta(description="`false` ignores this table.")] = True
