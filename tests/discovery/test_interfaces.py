from __future__ import annotations

import ipaddress
import json
import shutil
import subprocess

import pytest
import trio

from llmgw.discovery.interfaces import interface_of, interfaces


def test_loopback() -> None:
    assert ("lo", ipaddress.IPv4Address("127.0.0.1")) in list(interfaces())
    assert trio.run(interface_of, "127.0.0.1") == "lo"
    assert trio.run(interface_of, "localhost") == "lo"
    assert trio.run(interface_of, "127.0.0.2") == "lo", "it has the whole network, and lists one address of it"


def test_nobody_s_address_is_on_none() -> None:
    assert trio.run(interface_of, "192.0.2.77") is None
    assert trio.run(interface_of, "no-such-host.invalid") is None


@pytest.mark.skipif(shutil.which("ip") is None, reason="no iproute2 to compare with")
def test_the_same_as_ip_says() -> None:
    said = json.loads(subprocess.run(["ip", "-j", "addr"], capture_output=True, check=True).stdout)
    wanted = {
        (entry["ifname"], ipaddress.ip_address(info["local"]))
        for entry in said
        for info in entry.get("addr_info", ())
        if "local" in info
    }
    assert set(interfaces()) == wanted
