"""Two nodes that try each other, over real sockets: on the loopback, and through a bridge that loses large packets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from attrs import evolve

from llmgw.cli.doctor_peer import host_and_port
from llmgw.doctor.checks import CHECKS
from llmgw.doctor.document import Document, as_json, from_json
from llmgw.doctor.facts import Facts
from llmgw.doctor.peer import End, ask_peer, wait_for_peers
from llmgw.doctor.peer_facts import Peer, PeerPath
from llmgw.doctor.peer_here import resolve
from llmgw.doctor.report import lines
from llmgw.doctor.verdict import Severity, Verdict, judge
from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Host

TOP = Path(__file__).resolve().parents[2]
HOME = "127.0.0.1"


def end(name: str = "here", ahead: float = 0.0, leads_to: str = HOME, mtu: int = 1500) -> End:
    async def resolved(_name: str) -> tuple[str, ...]:
        await trio.lowlevel.checkpoint()
        return (leads_to,)

    async def size(_address: str) -> int:
        await trio.lowlevel.checkpoint()
        return mtu

    return End(name, lambda: 1000.0 + ahead, resolved, size)


async def tried(here: End, there: End, ports: tuple[int, ...] = (23000, 23007)) -> tuple[Peer, PeerPath | None]:
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(wait_for_peers, there, [HOME], 0, lambda _: None)
        found = await ask_peer(here, HOME, listeners[0].socket.getsockname()[1], ports)
        nursery.cancel_scope.cancel()
    return found


def judged(peer: Peer, path: PeerPath | None) -> tuple[Facts, dict[str, Verdict]]:
    facts = Facts(host=Host("here", ""), peer=peer, peer_path=path or PeerPath())
    return facts, {v.id: v for v in judge(facts, CHECKS) if v.id.startswith("peer.")}


async def test_two_nodes_that_reach_each_other() -> None:
    peer, path = await tried(end("here"), end("there", mtu=1400))
    assert (peer.address, peer.name, peer.trouble) == (HOME, "there", "")
    assert path is not None
    assert (path.address, path.seen, path.named_here, path.named_there) == (HOME, HOME, (HOME,), (HOME,))
    for way, mtu in ((path.there, 1500), (path.back, 1400)):
        assert [p.trouble for p in way.ports] == ["", ""]
        assert (way.mtu, way.largest, way.bulk) == (mtu, mtu, "")
    facts, verdicts = judged(peer, path)
    assert {v.severity for v in verdicts.values()} == {Severity.OK}
    assert "2 of 2 ports open, packets up to 1500 of 1500 bytes; back: 2 of 2" in "\n".join(
        line.text for line in lines(facts, judge(facts, CHECKS))
    )
    document = Document("1", False, facts)
    assert from_json(json.loads(json.dumps(as_json(document, CHECKS))), "file") == document


async def test_clocks_and_names_that_do_not_agree() -> None:
    _, verdicts = judged(*await tried(end("here"), end("there", ahead=7.0, leads_to="10.9.9.9")))
    assert verdicts["peer.clock"].severity is Severity.FAIL
    assert verdicts["peer.clock"].text == "The clock of there is 7.0 s ahead of this one."
    assert verdicts["peer.name"].text.endswith("on there here is 10.9.9.9, not 127.0.0.1.")


async def test_a_port_that_is_taken_is_shifted_and_one_that_nobody_opens_is_told() -> None:
    with trio.socket.socket() as taken:
        await taken.bind((HOME, 23100))
        taken.listen()
        _, path = await tried(end(), end(), (23100,))
    assert path is not None
    assert [p.port for p in path.there.ports] == [23101]
    # The loopback has no firewall: what one would do is laid over it.
    shut = evolve(path.back, ports=tuple(evolve(p, trouble="no answer within 2 s") for p in path.back.ports))
    _, verdicts = judged(Peer("there", HOME), evolve(path, back=shut))
    said = f"from there to here 1 of 1 do not open: {shut.ports[0].port} (no answer within 2 s)"
    assert said in verdicts["peer.ports"].text


@pytest.mark.parametrize(
    ("says", "trouble"),
    [
        (b"", "it ended the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it does not speak as llmgw doctor does"),
        (b"[1]\n", "it does not speak as llmgw doctor does"),
        (b"[" * 9000 + b"\n", "it does not speak as llmgw doctor does"),
        (b"x" * 40_000, "it says too much"),
        (b'{"doctor": 99}\n', "it is of another version of llmgw doctor, or something else"),
        (b'{"doctor": 1, "name": "n", "seen": "x", "named": []}\n', "it names an address that is none"),
        (b'{"doctor": 1, "name": 7, "seen": "::1", "named": []}\n', "it does not speak as llmgw doctor does"),
        (b'{"doctor": 1, "name": "n", "seen": "::1", "named": []}\n{"now": 1e400}\n', "it says a time that cannot be"),
        (b'{"no": "go away"}\n', "go away"),
    ],
)
async def test_what_is_no_doctor(says: bytes, trouble: str) -> None:
    async def partner(stream: trio.SocketStream) -> None:
        await stream.receive_some(4096)
        try:
            await stream.send_all(says)
            await stream.send_eof()
            await stream.receive_some(4096)
        except trio.BrokenResourceError:
            pass

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, partner, 0, host=HOME))
        peer, path = await ask_peer(end(), HOME, listener.socket.getsockname()[1], (23200,))
        nursery.cancel_scope.cancel()
    assert (peer.trouble, path) == (trouble, None)


async def test_who_says_nothing_is_left(mock_clock: trio.testing.MockClock) -> None:
    mock_clock.rate = 100

    async def partner(_stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, partner, 0, host=HOME))
        peer, path = await ask_peer(end(), HOME, listener.socket.getsockname()[1], ())
        nursery.cancel_scope.cancel()
    assert (peer.trouble, path) == ("no answer within 8 s", None)


async def test_nobody_there() -> None:
    with trio.socket.socket() as free:
        await free.bind((HOME, 0))
        port = free.getsockname()[1]
    peer, path = await ask_peer(end(), HOME, port, ())
    assert (peer.trouble, path) == (f"port {port}: Connection refused", None)
    _, verdicts = judged(peer, path)
    assert verdicts["peer.reach"].severity is Severity.FAIL
    assert (await ask_peer(end(), "no-such-host.invalid", port, ()))[0].trouble.startswith(f"port {port}: ")
    assert await resolve("no-such-host.invalid") == ()


async def test_who_asks_cannot_have_more_than_the_doctor_does() -> None:
    told: list[str] = []
    hello = b'{"doctor": 1, "name": "x"}\n' + b'{"ask": "clock"}\n' * 5
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(wait_for_peers, end(), [HOME], 0, told.append)
        port = listener.socket.getsockname()[1]
        for asked in (b'{"ports": [22]}', b'{"ports": "all"}', b'{"ports": %s}' % json.dumps([2000] * 17).encode()):
            async with await trio.open_tcp_stream(HOME, port) as stream:
                await stream.send_all(hello + asked + b"\n")
                assert await stream.receive_some(65536)
                with trio.move_on_after(5):
                    while await stream.receive_some(65536):
                        pass
        async with await trio.open_tcp_stream(HOME, port) as first:
            await first.send_all(b'{"doctor": 1, "name": "x"}\n')
            await first.receive_some(4096)
            assert (await ask_peer(end(), HOME, port, ()))[0].trouble == "it is trying another node just now, ask again"
        nursery.cancel_scope.cancel()
    assert told[:3] == [f"{HOME}: {why}" for why in (
        "it says a number that cannot be", "it does not name ports", "it does not name ports",
    )]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "place"),
    [("node-2", ("node-2", 28029)), ("node-2:9000", ("node-2", 9000)), ("fe80::1", ("fe80::1", 28029)),
     ("[fe80::1]:99", ("fe80::1", 99))],
)  # fmt: skip
def test_how_another_node_is_named(said: str, place: tuple[str, int]) -> None:
    assert host_and_port(said) == place


@pytest.mark.parametrize("said", ["", ":1", "a:0", "a:x", "a:99999999999", "[::1]:"])
def test_names_that_are_none(said: str) -> None:
    if said == "[::1]:":
        assert host_and_port(said) == ("::1", 28029)
        return
    with pytest.raises(OperatorError, match="is no HOST"):
        host_and_port(said)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def two_nodes() -> Iterator[tuple[str, str]]:
    """Two network namespaces with interfaces of 1500 bytes, and between them a bridge that takes 1400."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip")
    tag = f"gw{os.getpid()}"
    names = [f"{tag}{which}" for which in "abx"]
    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError:
        pytest.skip("network namespaces cannot be made here")
    try:
        ip("-n", names[2], "link", "add", "br0", "type", "bridge")
        ip("-n", names[2], "link", "set", "br0", "up")
        for number, name in enumerate(names[:2], 1):
            # Without segmentation below the kernel, so that every packet is of the size that it says.
            ip("-n", name, "link", "add", "eth0", "gso_max_segs", "1", "type", "veth", "peer", f"p{number}", "netns",
               names[2])  # fmt: skip
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
            ip("-n", names[2], "link", "set", f"p{number}", "master", "br0", "up")
        ip("-n", names[2], "link", "set", "p2", "mtu", "1400")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.long
def test_a_path_that_loses_large_packets_and_says_nothing(two_nodes: tuple[str, str]) -> None:
    here, there = two_nodes
    line = [sys.executable, "-m", "llmgw", "doctor"]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(TOP), "PYTHONUNBUFFERED": "1"}
    waiting = subprocess.Popen(
        ["ip", "netns", "exec", there, *line, "--peer-wait", "1"], env=env, text=True, stdout=subprocess.PIPE
    )
    try:
        assert waiting.stdout is not None
        assert "waiting for 1 minutes on all addresses, port 28029" in waiting.stdout.readline()
        words = [*line, "--peer", "10.77.0.2", "--only", "peer", "--json", "--no-redact"]
        done = subprocess.run(
            ["ip", "netns", "exec", here, *words], env=env, text=True, capture_output=True, timeout=60, check=False
        )
    finally:
        waiting.kill()
        waiting.communicate()
    said = json.loads(done.stdout)
    assert done.returncode == 1
    path = said["facts"]["peer_path"]
    assert (path["there"]["mtu"], path["there"]["largest"], path["back"]["largest"]) == (1500, 1400, 1400)
    finding = next(f for f in said["findings"] if f["id"] == "peer.mtu")
    assert finding["severity"] == "fail"
    assert "256 KiB over TCP did not get through within 2.5 s, and packets above 1400 bytes vanish" in finding["text"]
    assert next(f["severity"] for f in said["findings"] if f["id"] == "peer.ports") == "ok"
