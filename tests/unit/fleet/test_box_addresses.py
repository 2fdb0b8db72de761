"""Boxes as commands are given them: one reader, with what each command can reach."""

from __future__ import annotations

import pytest

from appliance.errors import FleetError
from appliance.fleet.box_addresses import Box, Reach, read_boxes


@pytest.mark.parametrize(
    ("url", "box"),
    [
        ("http://192.0.2.1", Box("one", "http://192.0.2.1:11500", "192.0.2.1", 11500)),
        ("http://192.0.2.1:80/", Box("one", "http://192.0.2.1:80", "192.0.2.1", 80)),
        ("http://box.example.org:8080", Box("one", "http://box.example.org:8080",
                                            "box.example.org", 8080)),
        ("https://box.example.org", Box("one", "https://box.example.org", "box.example.org", 443)),
        ("http://[2001:db8::1]:9", Box("one", "http://[2001:db8::1]:9", "2001:db8::1", 9)),
        ("unix:/run/appliance/admin.sock", Box("one", "unix:/run/appliance/admin.sock")),
    ],
)  # fmt: skip
def test_an_address_is_read_the_same_wherever_it_is_allowed(url: str, box: Box) -> None:
    for reach in Reach:
        is_ipv4 = box.address.replace(".", "").isdigit()
        if reach is Reach.PICKER and not is_ipv4:
            allowed = False
        else:
            allowed = bool(box.address) or reach is Reach.HERE_TOO
        if allowed:
            assert read_boxes((f"one={url}",), reach) == (box,)
        else:
            with pytest.raises(FleetError, match=r"^--box 'one="):
                read_boxes((f"one={url}",), reach)


@pytest.mark.parametrize("reach", list(Reach))
@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        (("http://192.0.2.1",), "give NAME=URL"),
        (("One=http://192.0.2.1",), "small letters"),
        (("one=ftp://192.0.2.1",), "is no address of a box; give http"),
        (("one=http:///path",), "is no address of a box"),
        (("one=unix:socket",), "is no address of a box"),
        (("one=http://192.0.2.1:99999",), "Port out of range"),
        (("one=http://192.0.2.1/v1",), "has more than an address"),
        (("one=http://me:secret@192.0.2.1",), "has more than an address"),
        (("one=http://192.0.2.1", "one=http://192.0.2.2"), "have the name one"),
        (("one=http://192.0.2.1", "two=http://192.0.2.1:11500"), "have the URL"),
    ],
)
def test_mistakes_say_what_is_wrong(texts: tuple[str, ...], complaint: str, reach: Reach) -> None:
    with pytest.raises(FleetError, match=complaint):
        read_boxes(texts, reach)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("https://192.0.2.1", "no HTTPS"),
        ("http://box.example.org", "'box.example.org' is no IPv4 address"),
    ],
)
def test_the_picker_reaches_less(url: str, complaint: str) -> None:
    with pytest.raises(FleetError, match=complaint):
        read_boxes((f"one={url}",), Reach.PICKER)
