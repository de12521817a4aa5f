"""The client of the admin API over real sockets: TLS, a context's certificate, and one step from a follower to its leader."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve, frozen

from llmgw.cli.admin_client import AdminClient, Refused, of_context
from llmgw.cli.contexts import Context
from llmgw.errors import OperatorError, PeerError
from llmgw.link import ca
from llmgw.settings.daemon import Address, AdminTls
from llmgw.web.access import Access
from llmgw.web.admin_tls import AdminTlsContext
from llmgw.web.api import app
from llmgw.web.serve import listen, serve
from llmgw.web.source import Identity
from tests.web.admin import TOKEN, Picture

DOMAIN = "t.example"
RELEASE = "brake/release"
"""What only the leader answers: here with 409, since its brake is not on."""


class Plane(Picture):
    """A control plane that follows, where there is somebody to lead."""

    leader: str | None = None
    asked = 0

    def identity(self) -> Identity:
        self.asked += 1
        told = super().identity()
        return told if self.leader is None else evolve(told, leads=False, leader=self.leader)


@frozen
class Two:
    """Two control planes on sockets; the first follows the second."""

    one: Plane
    two: Plane
    port: int
    other: int

    def client(self, ca_file: Path | None = None, **files: str) -> AdminClient:
        if ca_file is None:
            return AdminClient("127.0.0.1", self.port, TOKEN)
        token = "" if files else TOKEN
        return of_context(Context(f"https://localhost:{self.port}", "", token, str(ca_file), **files))


def made(folder: Path) -> AdminTls:
    """A CA of its own, and a certificate of it for localhost."""
    now = time.time()
    ca.init(folder / "ca", DOMAIN, now - 86400)
    files = ca.issue_server(folder / "ca", ("localhost",), folder / "server", 30, now)
    return AdminTls(files.certificate, files.key, files.ca)


@asynccontextmanager
async def two(first: AdminTls | None = None, second: AdminTls | None = None, token: str = TOKEN) -> AsyncIterator[Two]:
    async with trio.open_nursery() as nursery:
        planes, ports = (Plane(), Plane()), []
        for plane, tls in zip(planes, (first, second), strict=True):
            listener = listen(Address("127.0.0.1", 0))
            ports.append(listener.getsockname()[1])
            known = token if plane is planes[1] else TOKEN
            served = app(plane, Access(known, trust_domain=DOMAIN, clock=time.time))
            await nursery.start(serve, served, listener, None if tls is None else AdminTlsContext(tls))
        planes[0].leader = f"{'127.0.0.1' if second is None else 'localhost'}:{ports[1]}"
        yield Two(*planes, *ports)
        nursery.cancel_scope.cancel()


async def away(work: Callable[[], Any]) -> Any:
    return await trio.to_thread.run_sync(work)


def lines(client: AdminClient) -> list[Any]:
    return list(client.lines("whoami"))


async def refused(client: AdminClient, path: str = RELEASE) -> Refused:
    with pytest.raises(Refused) as said:
        await away(lambda: client.post(path, {}))
    return said.value


async def test_over_tls_the_leader_is_asked_with_the_same_credentials(tmp_path: Path) -> None:
    tls = made(tmp_path)
    person = ca.issue_person(tmp_path / "ca", "ada", "operator", tmp_path / "ada", 1, time.time())
    async with two(tls, tls) as planes:
        for client in (
            planes.client(Path(str(tls.ca))),
            planes.client(Path(str(tls.ca)), certificate=str(person.certificate), key=str(person.key)),
        ):
            told = await refused(client)
            assert (told.status, told.thing) == (409, f"admin API at localhost:{planes.other}"), told
            # A stream is opened in the same way as all else.
            (who,) = await away(partial(lines, client))
            assert who["role"] in ("admin", "operator")
        with pytest.raises(PeerError, match="not trusted"):
            await away(lambda: planes.client(Path(str(made(tmp_path / "other").ca))).get("whoami"))


async def test_a_leader_whose_certificate_does_not_verify_gets_nothing(tmp_path: Path) -> None:
    ours, strange = made(tmp_path / "ours"), made(tmp_path / "strange")
    async with two(ours, strange) as planes:
        client = planes.client(Path(str(ours.ca)))
        with pytest.raises(PeerError, match=f"localhost:{planes.other}.*not trusted.*context add --ca"):
            await away(lambda: client.post(RELEASE, {}))
        assert client.tls is not None
        client.tls.check_hostname = False  # as it is for the server on this machine: it trusts one file, by no name
        assert (await refused(client)).status == 421
        assert planes.two.asked == 0
    # Never from TLS to plain text.
    async with two(ours, None) as planes:
        planes.one.leader = f"localhost:{planes.other}"
        with pytest.raises(PeerError):
            await away(lambda: planes.client(Path(str(ours.ca))).post(RELEASE, {}))
        assert planes.two.asked == 0


async def test_in_plain_text_only_this_machine_gets_a_token_and_there_is_one_step() -> None:
    async with two() as planes:
        client = planes.client()
        assert (await refused(client)).status == 409
        for leader, words in (
            ("192.0.2.7:8001", "192.0.2.7:8001 does, and gets no credentials in plain text"),
            ("", "none does at the moment"),
            ("http://[", "the leader that"),
        ):
            planes.one.leader = leader
            with pytest.raises(OperatorError) as said:
                await away(lambda: client.post(RELEASE, {}))
            assert words in str(said.value)
        planes.one.leader, planes.two.leader = f"127.0.0.1:{planes.other}", f"127.0.0.1:{planes.port}"
        told = await refused(client)
        assert (told.status, planes.two.asked) == (421, 2), "it is asked once, and sends nobody further"
        assert f"127.0.0.1:{planes.port}" in str(told)
    async with two(token="llmgw_admin_other") as planes:
        told = await refused(planes.client())
        assert (told.status, "which does, does not know who asks" in str(told)) == (421, True), told
