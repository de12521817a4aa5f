from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.router.media import refusal


@pytest.mark.parametrize(
    "address",
    [
        "https://images.example.com/a.png?size=1#x",
        "http://8.8.8.8:8080/x",
        "https://[2606:4700::1111]/x",
        "DATA:image/png;base64,AAAA",
        "https://face1.de/a",
        "https://cafe.fade/a",
        "https://example.com./",
    ],
)
def test_public(address: str) -> None:
    assert refusal(address) is None


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1/", "http://127.1/", "http://0x7f.1/", "http://2130706433/", "http://0177.0.0.1/",
        "http://10.1.2.3/", "http://192.168.0.1:80/", "http://172.16.0.1/", "http://169.254.169.254/latest/meta-data",
        "http://100.64.0.1/", "http://0.0.0.0/", "http://224.0.0.1/", "http://[::1]/", "http://[::ffff:10.0.0.1]/",
        "http://[fe80::1%25eth0]/", "http://[fd00::1]/", "http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/",
        "http://localhost/", "http://LOCALHOST./", "http://a.localhost/", "http://gpu-1/", "http://db.internal/",
        "http://svc.cluster.local/", "http://user:pw@example.com/", "http://example.com@10.0.0.1/",
        "ftp://example.com/", "file:///etc/passwd", "//example.com/", "example.com", "", "http://", "http:///x",
        "http://exa mple.com/", "http://example.com\\@10.0.0.1/", "http://exam\nple.com/", "http://①②⑦.0.0.1/",
        "http://example.com:99999999/", "http://[::1/", "http://a..b/", "http://1.2.3.0x4/",
    ],
)  # fmt: skip
def test_not_public(address: str) -> None:
    assert refusal(address)


def test_only_the_hosts_that_are_listed() -> None:
    hosts = ("cdn.example.org", ".images.example.org", "10.0.0.9")
    assert refusal("https://CDN.example.org/x", hosts) is None
    assert refusal("https://a.images.example.org/x", hosts) is None
    assert refusal("http://10.0.0.9/x", hosts) is None, "a private one that the operator names"
    for host in ("example.org", "evilcdn.example.org", "images.example.org", "cdn.example.org.evil.com", "8.8.8.8"):
        assert "media_hosts" in (refusal(f"https://{host}/", hosts) or "")


@given(st.ip_addresses(v=4), st.sampled_from(["dotted", "number", "hex", "short"]))
def test_no_spelling_of_an_address_gets_past(address: ipaddress.IPv4Address, spelling: str) -> None:
    number = int(address)
    text = {
        "dotted": str(address),
        "number": str(number),
        "hex": hex(number),
        "short": f"{number >> 24}.{number & 0xFFFFFF}",
    }[spelling]
    if refusal(f"http://{text}/") is None:
        assert spelling == "dotted"
        assert address.is_global
