"""The type ``new``: GTE as its authors publish it, with code for the configuration as well.

Transformers has the model by now, with the same keys, under the type ``gte``. vLLM has a class for
either name of it, and asks for this one by the name of its configuration.
"""

from __future__ import annotations

from transformers import GteConfig


class NewConfig(GteConfig):  # type: ignore[no-untyped-call]
    """As the published code calls it."""

    model_type = "new"
