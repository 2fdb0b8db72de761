"""A model with an adapter is a model of its own to keys."""

from __future__ import annotations

import msgspec
import pytest

from appliance.access.admission import Admission
from appliance.access.auth import Access
from appliance.access.keys import Key
from appliance.service.interface import ModelNotFound, SubmitRequest
from tests.unit.access.test_prefix_salts import Ignoring, Service, key


@pytest.mark.parametrize(
    ("models", "asked", "allowed"),
    [
        ((), "other:legal", False),
        (("other:legal",), "other:legal", False),
        (("mm",), "mm", False),
        ((), "", True),
        ((), "m:legal", True),
        (("m",), "", True),
        (("m",), "m:legal", False),
        (("m:legal",), "m:legal", True),
        (("m:legal",), "m:polite", False),
        (("m:legal",), "", False),
    ],
)
def test_a_key_names_adapters_one_by_one(
    models: tuple[str, ...], asked: str, allowed: bool
) -> None:
    service = Service()
    admission = Admission(
        service,  # type: ignore[arg-type]
        Access(clock=lambda: 0.0),
        share_prefix_cache=True,
    )
    caller = key("alice", "a")
    assert caller.meter is not None
    caller.meter.change(_of(caller.meter.key, models), 0.0)
    request = SubmitRequest(id="r", model="m", asked=asked, prompt=(1,), max_tokens=3, body=b"")

    if allowed:
        admission.submit(request, caller, Ignoring())
    else:
        with pytest.raises(ModelNotFound):
            admission.submit(request, caller, Ignoring())

    assert len(service.salts) == allowed


def _of(key: Key, models: tuple[str, ...]) -> Key:
    return msgspec.structs.replace(key, models=models)
