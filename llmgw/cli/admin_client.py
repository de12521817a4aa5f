"""A client of the admin API for commands that run once and end."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from attrs import evolve, frozen

from llmgw.cli import contexts
from llmgw.cli.files import server_config
from llmgw.errors import OperatorError, PeerError
from llmgw.web.admin_tls import is_loopback
from llmgw.web.auth import TOKEN_FILE, read_token

_TIMEOUT_S = 10.0
_STREAM_S = 20.0
"""Of a stream something comes every few seconds."""
_SAVING_S = 60.0
_CHUNK = 256 * 1024
_UNKNOWN, _NOT_LEADER = 401, 421
_DEFAULT_CONFIGS = (Path("server.yaml"), Path("/etc/llmgw/server.yaml"))


class Refused(OperatorError):
    """The control plane answered with an error. ``answer`` is all that it said."""

    def __init__(self, name: str, status: int, answer: Any, said: Mapping[str, str]) -> None:
        super().__init__(name, said.get("reason", f"answered {status}"), said.get("remedy", ""))
        self.status = status
        self.answer = answer


@frozen
class AdminClient:
    """Where the control plane's admin listener is, and the token for it."""

    host: str
    port: int
    token: str
    tls: ssl.SSLContext | None = None

    def get(self, path: str, timeout_s: float = _TIMEOUT_S) -> Any:
        """The JSON answer of ``GET /api/v1/<path>``.

        Raises :class:`PeerError` when nothing answers, :class:`OperatorError` when the answer is an error.
        """
        return self._ask("GET", path, None, timeout_s)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = _TIMEOUT_S) -> Any:
        """The JSON answer of ``POST /api/v1/<path>`` with this JSON body; raises as :meth:`get` does."""
        return self._ask("POST", path, json.dumps(body).encode(), timeout_s)

    def save(self, path: str, file: Path) -> int:
        """Write the answer of ``GET /api/v1/<path>`` into a file that is there; returns its size.

        Raises as :meth:`get` does.
        """
        with self._answer("GET", path, None, _SAVING_S) as (by, answer):
            if answer.status != 200:
                by._value(answer.status, answer.read())
            with file.open("wb") as out:
                shutil.copyfileobj(answer, out, _CHUNK)
        return file.stat().st_size

    def lines(self, path: str) -> Iterator[Any]:
        """The JSON of each line of the answer of ``GET /api/v1/<path>``, as it comes; raises as :meth:`get` does."""
        with self._answer("GET", path, None, _STREAM_S) as (by, answer):
            if answer.status != 200:
                by._value(answer.status, answer.read())
            while line := answer.readline():
                try:
                    said = json.loads(line)
                except ValueError as cut:
                    raise PeerError(by.name, "ended in the middle of a line", "ask again") from cut
                yield said

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:
        with self._answer(method, path, body, timeout_s) as (by, answer):
            return by._value(answer.status, answer.read())

    @property
    def name(self) -> str:
        """What it is called in errors."""
        return f"admin API at {self.host}:{self.port}"

    def away(self, failed: BaseException) -> PeerError:
        """What to say of a connection that could not be made, or that broke."""
        causes = [failed]
        while (deeper := _cause(causes[-1])) is not None:
            causes.append(deeper)
        for cause in causes:
            if isinstance(cause, ssl.SSLCertVerificationError):
                reason = f"has a certificate that is not trusted: {cause.verify_message}"
                return PeerError(self.name, reason, "name its CA in a context: llmgw ctl context add --ca")
        first = causes[-1]
        reason = getattr(first, "strerror", None) or str(first) or type(first).__name__
        if isinstance(first, OSError) and first.errno and not isinstance(first, ssl.SSLError | socket.gaierror):
            reason = os.strerror(first.errno)  # trio says to which address, which stands there already
        return PeerError(self.name, f"does not answer: {reason}", "check that llmgw server runs, and --admin")

    @contextmanager
    def _answer(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> Iterator[tuple[AdminClient, http.client.HTTPResponse]]:
        """Who answers, and an answer to be read in the block; between two pieces of it may be ``timeout_s``.

        Who does not lead and says who does is left for the leader, once.
        """
        with self._opened(method, path, body, timeout_s) as answer:
            if answer.status != _NOT_LEADER:
                yield self, answer
                return
            leader = self._leader(answer.read())
        with leader._opened(method, path, body, timeout_s) as answer:
            if answer.status == _UNKNOWN:
                said = json.loads(answer.read()) if answer.getheader("content-type") == "application/json" else None
                raise Refused(self.name, _NOT_LEADER, said, {
                    "reason": f"it does not lead, and {leader.host}:{leader.port}, which does, does not know who asks",
                    "remedy": "ask the one that does with its own token, or with one of llmgw ctl admin-token create, "
                    "which all of them know",
                })  # fmt: skip
            yield leader, answer

    @contextmanager
    def _opened(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = (
            http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
            if self.tls is None
            else http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=self.tls)
        )
        fields = {"authorization": f"Bearer {self.token}"} if self.token else {}
        if body is not None:
            fields["content-type"] = "application/json"
        try:
            connection.request(method, f"/api/v1/{path}", body, fields)
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as failed:
            raise self.away(failed) from failed
        finally:
            connection.close()

    def _leader(self, content: bytes) -> AdminClient:
        """Who leads, by what one that does not says, to be asked with the same credentials in the same way.

        Over TLS its certificate has to verify for its name; in plain text only this machine itself gets the token.
        Raises :class:`OperatorError` where nobody leads, or the leader may not be asked.
        """
        try:
            value = json.loads(content)
            leader = value.get("leader") if isinstance(value, dict) else None
        except ValueError:
            value = leader = None
        if not isinstance(leader, str) or not leader:
            self._value(_NOT_LEADER, content)
            raise PeerError(self.name, f"answered {_NOT_LEADER}")
        _, host, port = _parts(leader, f"the leader that {self.name} names")
        trusted = is_loopback(host) if self.tls is None else self.tls.check_hostname
        if not trusted:
            way = "in plain text" if self.tls is None else "with nothing to check its certificate by"
            scheme = "http" if self.tls is None else "https"
            raise Refused(self.name, _NOT_LEADER, value, {
                "reason": f"it does not lead; {leader} does, and gets no credentials {way}",
                "remedy": f"ask it yourself: llmgw ctl --admin {scheme}://{leader} with its token, or with a context",
            })  # fmt: skip
        return evolve(self, host=host, port=port)

    def _value(self, status: int, content: bytes) -> Any:
        try:
            value = json.loads(content)
        except ValueError as failed:
            raise PeerError(
                self.name, f"answered {status} and no JSON", "is it an llmgw server? see --admin"
            ) from failed
        if status != 200:
            said = value.get("error", {}) if isinstance(value, dict) else {}
            raise Refused(self.name, status, value, said)
        return value


def _cause(failed: BaseException) -> BaseException | None:
    """What an exception comes from: of a group, which is of attempts at one address after the other, the last one's."""
    return failed.exceptions[-1] if isinstance(failed, BaseExceptionGroup) else failed.__cause__


def client_of(ctx: click.Context) -> AdminClient:
    """The client that the options of ``llmgw ctl`` lead to. Raises as :func:`connect` does."""
    return connect(*ctx.obj)


def connect(admin: str | None, token_file: Path | None, config: Path | None, context: str | None = None) -> AdminClient:
    """Find the admin listener, and who one is there.

    In this order: the context that is named; the other options and their variables; the context of ``LLMGW_CONTEXT``;
    the context in use; ``server.yaml`` here or in ``/etc/llmgw``. Raises :class:`OperatorError`.
    """
    given = not (admin is None and token_file is None and config is None)
    if context is None and not given:
        context = os.environ.get("LLMGW_CONTEXT") or contexts.load().current or None
    if context is not None:
        if given:
            raise OperatorError("--context", "is given beside --config, --admin or --token-file", "leave one out")
        return of_context(contexts.load().named(context))
    if config is None and (admin is None or token_file is None):
        config = next((path for path in _DEFAULT_CONFIGS if path.exists()), None)
        if config is None and given:
            has, lacks = ("--admin", "--token-file") if token_file is None else ("--token-file", "--admin")
            raise OperatorError(
                has, f"is given without {lacks}, and there is no server.yaml here", f"give {lacks} as well"
            )
        if config is None:
            raise OperatorError(
                "llmgw ctl",
                "it is not said which control plane to ask",
                "name its server.yaml with --config, a context with --context, or give --admin and --token-file",
            )
    host, port = "", 0
    tls: ssl.SSLContext | None = None
    if config is not None:
        server = server_config(config)
        host, port = server.admin.listen.host, server.admin.listen.port
        token_file = token_file or Path(server.state_dir) / TOKEN_FILE
        if server.admin.tls is not None:
            tls = _own(server.admin.tls.certificate)
    if admin is not None:
        secure, host, port = _parts(admin, "--admin")
        if secure and tls is None:
            tls = ssl.create_default_context()
        if not secure:
            tls = None
    assert token_file is not None
    return AdminClient({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port, read_token(token_file), tls)


def of_context(context: contexts.Context) -> AdminClient:
    """The client of a context."""
    secure, host, port = _parts(context.address, "address of the context")
    tls: ssl.SSLContext | None = None
    if secure:
        try:
            tls = ssl.create_default_context(cafile=context.ca or None)
            if context.certificate:
                tls.load_cert_chain(context.certificate, context.key, password="")
        except (OSError, ssl.SSLError) as wrong:
            raise OperatorError("context", f"has a certificate, key or CA that cannot be used: {wrong}") from wrong
    token = context.token or (read_token(Path(context.token_file)) if context.token_file else "")
    return AdminClient(host, port, token, tls)


def _own(certificate: str) -> ssl.SSLContext:
    """Trusts the very certificate of the server on this machine, under whatever name it is reached."""
    made = ssl.create_default_context(cafile=certificate)
    made.check_hostname = False
    made.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    return made


def _parts(address: str, thing: str) -> tuple[bool, str, int]:
    wrong = OperatorError(thing, f"expected https://HOST:PORT or http://HOST:PORT, found {address[:200]}")
    try:
        parts = urlsplit(address if "//" in address else f"http://{address}")
        host, port = parts.hostname, parts.port
    except ValueError as bad:
        raise wrong from bad
    if parts.scheme not in ("http", "https") or not host:
        raise wrong
    return parts.scheme == "https", host, 8001 if port is None else port
