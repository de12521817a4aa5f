"""Facts without what names a machine: host names, addresses, UUIDs, secrets. Pure.

What is the same stays the same and networks stay networks, so that every check comes to the same verdict: of an IPv4
address the first eight bits are kept and each other bit is turned by a keyed hash of those before it (the scheme of
Crypto-PAn, J. Xu et al., 2002). Addresses that mean something by themselves are left.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Callable
from typing import Any

from llmgw.doctor.facts import Facts
from llmgw.settings.convert import strict_converter

HOST = "this-host"
PEER = "other-host"
PLANE = "control-plane"
_KEPT_BITS = 8
_AS_THEY_ARE = frozenset(
    {"firmware", "version", "kernel", "nccl", "cuda", "cuda_version", "vbios", "system", "pci_address"}
)
_V4 = re.compile(r"(?<![\w.])(\d{1,3}(?:\.\d{1,3}){3})(?!\w|\.\w)")
_V6 = re.compile(r"(?<![\w:.])([0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7})(?!\w|[:.]\w)")
_V4_NAME = re.compile(r"\bip(?:-\d{1,3}){4}\b")
"""How a cloud names a host by its address."""
_UUID = re.compile(r"\b([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})\b")
_PLAIN_UUID = re.compile(r"\b[0-9a-f]{32}\b")
_MAC = re.compile(
    r"\b(?:[0-9a-fA-F]{2}:){5,}[0-9a-fA-F]{2}\b|\b(?:[0-9a-fA-F]{2}-){5,}[0-9a-fA-F]{2}\b"
    r"|\b(?=[\d.]*[a-fA-F])[0-9a-fA-F]{4}\.[0-9a-fA-F]{4}\.[0-9a-fA-F]{4}\b"
)
"""Also the 20 octets of IPoIB, which end in a GUID."""
_VALUE = r"""(?:'[^']*'|"[^"]*"|[^\s,}]+)"""
_SECRET = re.compile(
    r"""(?i)((?<![\w-])[\w-]{0,80}(?:token|key|secret|passw)[\w-]{0,80}["']?\s*[=:]\s*|--[\w-]{0,80}(?:token|key|secret|passw)[\w-]{0,80}\s+)"""
    rf"{_VALUE}"
)
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[\w-]{8,}|gh[a-z]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{8,}|nvapi-[\w-]{8,}"
    r"|xox[a-z]-[\w-]{8,}|AKIA[A-Z0-9]{12,}|eyJ[\w-]{6,}(?:\.[\w-]+){1,2})"
    r"|(?i:(?<=bearer )|(?<=basic ))[^\s'\"]+|(?<=://)[^\s/@]+(?=@)"
)
"""Tokens of hubs and engines by how they begin, those of an Authorization header, and who logs in in a URL."""
_SERIAL = re.compile(
    r"(?i)((?:\b|_)serial(?:[ _]?(?:number|no\.?))?\s*[:=#]?\s*['\"]?|\bS/?N\s*[:=#]\s*)(?=\w*\d)\w{6,}"
)
_GUID = re.compile(
    r"(?<![\w:.])(?:0x[0-9A-Fa-f]{13,16}|[0-9A-Fa-f]{4}(?::[0-9A-Fa-f]{4}){3}|(?=\d*[a-f])[0-9a-f]{16})(?![\w:.])"
)
_HOME = re.compile(r"(?<=/home/|Users/)[^\s/:'\",]+")
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_COMMON = frozenset(
    {"localhost", "node", "host", "server", "nvidia", "cuda", "linux", "ubuntu", "debian", HOST, PEER, PLANE}
)


def key_of(facts: Facts) -> bytes:
    """What to hide a machine's names with where it has no secret to give: of its cards' UUIDs, which are the same every
    day and nobody's to guess. Without cards it is another one at each reading."""
    cards = "".join(sorted(card.reading.uuid for card in facts.cards))
    return hashlib.sha256(f"{facts.host.hostname} {cards or repr(facts)}".encode()).digest()


def redacted(facts: Facts, key: bytes) -> Facts:
    """The same facts with names and numbers replaced; with the same ``key`` by the same ones."""
    convert = strict_converter()
    plain = convert.unstructure(facts)
    names = {facts.peer.name: PEER, facts.peer.host: PEER, **{_host(r.address): PLANE for r in facts.reach}}
    blank = _blanker({**names, facts.address: HOST, facts.host.hostname: HOST}, key, _hardware(facts))
    said = {name: value if name in _AS_THEY_ARE else _walk(value, blank) for name, value in plain.items()}
    said["host"] |= {"hostname": HOST, "boot_id": ""}
    said["peer"] |= {name: _peer(said["peer"][name]) for name in ("host", "name")}
    for reach in said["reach"]:
        reach["address"] = _named(reach["address"], PLANE)
    said["address"] = _named(said["address"], HOST)
    for engine in said["engines"]:
        engine["command"] = _without_keys(engine["command"])
    return convert.structure(said, Facts)


def _walk(value: Any, blank: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {k: v if k in _AS_THEY_ARE else _walk(v, blank) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_walk(inner, blank) for inner in value]
    return blank(value) if isinstance(value, str) else value


def _without_keys(words: list[str]) -> list[str]:
    return [
        "hidden" if n and "key" in words[n - 1] and words[n - 1].startswith("-") else w for n, w in enumerate(words)
    ]


def _peer(name: str) -> str:
    """A node's name is replaced also where it is too short or too usual to be looked for; an address is by now."""
    return PEER if name and not _V4.fullmatch(name) and not _V6.fullmatch(name) else name


def _host(address: str) -> str:
    """Of a control plane's address, without the port."""
    return address.rpartition(":")[0].strip("[]")


def _named(address: str, shown: str) -> str:
    """An address that is a name, replaced; with its port where it has one. Of others the numbers are by now."""
    host, mark, port = address.rpartition(":")
    if not port.isdigit() or ":" in host.strip("[]"):
        host, mark, port = address, "", ""
    return f"{shown}{mark}{port}" if host and not _V4.fullmatch(host) and ":" not in host else address


def _hardware(facts: Facts) -> str:
    """What checks know things by: a host that is called like it is not looked for in text."""
    things = (
        *(c.reading.name for c in facts.cards),
        *(a.name for a in facts.adapters),
        *(n.name for n in facts.netdevs),
    )
    return " ".join((*things, *(m.name for m in facts.modules))).lower()


def _blanker(names: dict[str, str], key: bytes, hardware: str) -> Callable[[str], str]:
    words = {
        name: shown
        for whole, shown in names.items()
        for name in (whole, whole.partition(".")[0])
        if len(name) > 3
        and name.lower() not in _COMMON
        and not name.replace(".", "").isdigit()
        and name.lower() not in hardware
    }
    # Host names are the same in capitals, and the whole one goes before its first part.
    listed = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    host = re.compile(rf"(?i)(?<![\w.-])(?:{listed})(?![\w-])") if words else None
    # The machine's own domain, and the one above: of hosts nearby.
    own = {
        ".".join(name.split(".")[n:])
        for name in names
        for n in (1, 2)
        if name.count(".") > n and not _V4.fullmatch(name)
    }
    nearby = "|".join(map(re.escape, sorted(own, key=len, reverse=True)))
    domain = re.compile(rf"(?i)(?<![\w.-])(?:[\w-]+\.)+(?:{nearby})(?![\w-])") if own else None
    shown = {name.lower(): replacement for name, replacement in words.items()}

    def blank(text: str) -> str:
        text = _UUID.sub(lambda m: _uuid(m[1], key), text)
        text = _PLAIN_UUID.sub(lambda m: _digest(key, m[0])[:32], text)
        text = _MAC.sub("00:00:00:00:00:00", text)
        text = _HOME.sub(lambda m: f"user-{_digest(key, m[0])[:4]}", text)
        text = _V4_NAME.sub("ip-hidden", text)
        text = _SECRET.sub(lambda m: f"{m[1]}hidden", text)
        text = _TOKEN.sub("hidden", text)
        text = _MAIL.sub("hidden", text)
        text = _SERIAL.sub(lambda m: f"{m[1]}hidden", text)
        text = _GUID.sub(lambda m: _guid(m[0], key), text)
        text = _V4.sub(lambda m: _v4(m[1], key), text)
        text = _V6.sub(lambda m: _v6(m[1], key), text)
        text = text if host is None else host.sub(lambda m: shown[m[0].lower()], text)
        return text if domain is None else domain.sub("a-host", text)

    return blank


def _digest(key: bytes, text: str) -> str:
    return hashlib.sha256(key + text.encode()).hexdigest()


def _uuid(text: str, key: bytes) -> str:
    if not text.strip("0-"):
        return text
    made = _digest(key, text.lower())
    return f"{made[:8]}-{made[8:12]}-{made[12:16]}-{made[16:20]}-{made[20:32]}"


def _guid(text: str, key: bytes) -> str:
    """A GUID of an adapter or port, which is made of its MAC address; one that is unset means something."""
    plain = text.removeprefix("0x").replace(":", "")
    if not plain.strip("0"):
        return text
    made = _digest(key, plain.lower())[:16]
    return f"0x{made}" if text.startswith("0x") else ":".join(made[n : n + 4] for n in range(0, 16, 4))


def _v4(text: str, key: bytes) -> str:
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        return text
    if address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast:
        return text
    bits = f"{int(address):032b}"
    made = bits[:_KEPT_BITS]
    for at in range(_KEPT_BITS, 32):
        made += str(int(bits[at]) ^ (int(_digest(key, bits[:at])[0], 16) & 1))
    changed = ipaddress.IPv4Address(int(made, 2))
    # 169.254 means something: whatever lands there by chance stays what it was not.
    return f"169.0.{str(changed).split('.', 2)[2]}" if changed.is_link_local else str(changed)


def _v6(text: str, key: bytes) -> str:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return text
    mapped = address.ipv4_mapped
    if mapped is not None:
        return f"::ffff:{_v4(str(mapped), key)}"
    if address.is_loopback or address.is_unspecified:
        return text
    made = _digest(key, str(address))
    if address.is_link_local:
        # Its second half is the MAC address.
        return str(ipaddress.IPv6Address(f"fe80::{made[:4]}:{made[4:8]}:{made[8:12]}:{made[12:16]}"))
    network = _digest(key, bin(int(address) >> 64))
    return str(
        ipaddress.IPv6Address(
            f"2001:db8:{network[:4]}:{network[4:8]}:{made[:4]}:{made[4:8]}:{made[8:12]}:{made[12:16]}"
        )
    )
