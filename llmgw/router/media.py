"""Addresses of images and recordings in a request: an engine would fetch them from inside the cluster. Pure.

What is refused is what a reader of addresses could take for a machine of ours: schemes other than ``http(s)`` and
``data``, credentials, private and special addresses in any spelling that C libraries accept (``127.1``, ``0x7f.1``,
``2130706433``), and names without a public suffix. A public name that resolves to a private address cannot be seen
here; ``router.media_hosts`` lists the hosts that may be named, which closes that too.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

_NUMBER = re.compile(r"\d+|0[xX][0-9a-fA-F]*")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_OURS = ("localhost", "local", "internal", "intranet", "lan", "home", "corp", "arpa", "svc", "test", "invalid")
_CONTROL = re.compile(r"[\x00-\x20\x7f\\]")


def refusal(address: str, hosts: Sequence[str] = ()) -> str | None:
    """Why an engine must not fetch this, or ``None``. ``hosts`` are the only ones allowed where there are any; one
    that begins with a dot stands for all names below it."""
    if address[:5].lower() == "data:":
        return None
    if _CONTROL.search(address):
        return "has characters that no address has"
    try:
        parts = urlsplit(address)
        host, _port = parts.hostname, parts.port
    except ValueError:
        return "is no address"
    if parts.scheme not in ("http", "https"):
        return "has to begin with http://, https:// or data:"
    if parts.username is not None or parts.password is not None:
        return "must not have credentials in it"
    if not host:
        return "names no host"
    host = host.rstrip(".").lower()
    if hosts:
        named = any(host == h or (h.startswith(".") and host.endswith(h)) for h in (name.lower() for name in hosts))
        return None if named else "is not of a host that router.media_hosts lists"
    if not _is_public(host):
        return "does not lead to a public host"
    return None


def _is_public(host: str) -> bool:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        labels = host.split(".")
        # Some resolvers fold letters beyond ASCII to others, and a last label that is a number makes an address.
        named = host.isascii() and len(labels) > 1 and all(labels)
        return named and labels[-1] not in _OURS and not _NUMBER.fullmatch(labels[-1])
    inner = None
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF)
    return found.is_global and not found.is_multicast and (inner is None or inner.is_global)
