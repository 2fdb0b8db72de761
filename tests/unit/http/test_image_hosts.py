"""Where images may be fetched from: named hosts at public addresses, or in named networks."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from appliance.http.image_hosts import ImageHosts, is_public, normal_host, parse_host

HOSTS = ImageHosts(
    ["images.example.org", "*.cdn.example.org", "http://store:8080", "https://[2001:db8::1]"],
    ["10.1.2.0/24", "fd00:1::/64"],
)


@pytest.mark.parametrize(
    ("scheme", "host", "port"),
    [
        ("https", "images.example.org", None),
        ("https", "images.example.org", 443),
        ("https", "a.cdn.example.org", None),
        ("https", "a.b.cdn.example.org", None),
        ("http", "store", 8080),
        ("https", "2001:db8::1", None),
    ],
)
def test_allowed(scheme: str, host: str, port: int | None) -> None:
    assert HOSTS.allows(scheme, host, port)
    assert not ImageHosts().allows(scheme, host, port)


@pytest.mark.parametrize(
    ("scheme", "host", "port"),
    [
        ("http", "images.example.org", None),
        ("http", "images.example.org", 443),
        ("https", "images.example.org", 8443),
        ("https", "images.example.org.", None),
        ("https", "images.example.org.evil.org", None),
        ("https", "evilimages.example.org", None),
        ("https", "cdn.example.org", None),
        ("https", "evilcdn.example.org", None),
        ("https", "store", 8080),
        ("http", "store", None),
        ("ftp", "images.example.org", None),
        ("", "", None),
    ],
)
def test_not_allowed(scheme: str, host: str, port: int | None) -> None:
    assert not HOSTS.allows(scheme, host, port)


@pytest.mark.parametrize(
    "text",
    ["", "*", "*.", "https://", "ftp://a", "a/b", "a b", "user@a", "a:0", "a:99999", "a.*.b"],
)
def test_no_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no host such as|has no port"):
        parse_host(text)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Images.Example.org", "images.example.org"),
        ("HTTPS://b\u00fccher.example", "xn--bcher-kva.example"),
        ("[2001:DB8:0:0::1]", "2001:db8::1"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_hosts_are_written_in_one_way(text: str, host: str) -> None:
    assert parse_host(text) == ("https", host, 443, False)
    assert normal_host(text.lower().removeprefix("https://")) == host


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("images.example.org.", "ends with a dot: leave it out"),
        ("a..b", "is no name of a host"),
        ("-a.b", "no hyphen first or last"),
        ("a" * 64 + ".org", "1 to 63 letters"),
        (".".join(["abc"] * 64), "at most 253 characters"),
        ("a%2eb", "is no name of a host"),
        ("*.10.0.0.1", "no names below an address"),
        ("*.[::1]", "no names below an address"),
        ("10.0.1", "Expected 4 octets"),
        ("[1:2]", "At least 3 parts expected"),
        ("\u2603.example", "Invalid IDNA hostname"),
    ],
)
def test_what_is_wrong_with_a_host(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_host(text)


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700::1", "10.1.2.3", "fd00:1::5"])
def test_addresses(address: str) -> None:
    assert HOSTS.may_be_at(address)


LOCAL = [
    *(
        "0.0.0.0",
        "10.0.0.1",
        "10.1.3.1",
        "100.64.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "172.16.0.1",
    ),
    *("192.0.0.1", "192.0.2.1", "192.168.1.1", "198.18.0.1", "224.0.0.1", "240.0.0.1"),
    *("255.255.255.255", "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:1.1.1.1"),
    *("64:ff9b::7f00:1", "64:ff9b::101:101", "64:ff9b:1::1", "2002:7f00:1::", "2001:0:1::1"),
    *("3fff::1", "3fff:fff::1", "192.88.99.1"),
    *("fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "ff02::1", "2001:db8::1"),
]


@pytest.mark.parametrize("address", LOCAL)
def test_addresses_that_are_not_public(address: str) -> None:
    """Nor those that stand for another one, whatever that is."""
    assert not HOSTS.may_be_at(address)
    if "%" not in address:
        assert not is_public(ip_address(address))
