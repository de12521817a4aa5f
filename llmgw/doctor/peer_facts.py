"""What is read of the path to another node: parts of :class:`llmgw.doctor.facts.Facts`."""

from __future__ import annotations

from attrs import frozen


@frozen
class Peer:
    """Another node that this one was asked to try. ``host`` is as it was asked for, ``name`` what it calls itself.

    ``trouble`` is why the doctor there could not be spoken with.
    """

    host: str = ""
    address: str = ""
    name: str = ""
    trouble: str = ""


@frozen
class PeerPort:
    """A port that one node opened and the other tried. ``trouble`` is why it could not be reached."""

    port: int
    trouble: str = ""


@frozen
class Way:
    """What gets from one node to the other. Sizes are bytes of an IP packet.

    ``mtu`` is that of the sender's interface, ``largest`` the largest packet that arrived whole, 0 where none did.
    ``bulk`` is why more than a few packets over TCP did not arrive.
    """

    ports: tuple[PeerPort, ...] = ()
    mtu: int = 0
    largest: int = 0
    bulk: str = ""


@frozen
class PeerPath:
    """The bootstrap path to the other node, both ways.

    ``ahead_s`` is how far the other clock is ahead of this one, within half of ``rtt_ms``. ``address`` is this node's
    on that path and ``seen`` what the other one sees. ``named_here`` is what the other's name comes to here,
    ``named_there`` what this node's name comes to there.
    """

    rtt_ms: float = 0.0
    ahead_s: float = 0.0
    address: str = ""
    seen: str = ""
    named_here: tuple[str, ...] = ()
    named_there: tuple[str, ...] = ()
    there: Way = Way()
    back: Way = Way()
