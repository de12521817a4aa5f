"""A client of the admin API for commands that run once and end."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from attrs import frozen

from llmgw.cli.files import server_config
from llmgw.errors import OperatorError, PeerError
from llmgw.web.auth import TOKEN_FILE, read_token

_TIMEOUT_S = 10.0
_DEFAULT_CONFIGS = (Path("server.yaml"), Path("/etc/llmgw/server.yaml"))


@frozen
class AdminClient:
    """Where the control plane's admin listener is, and the token for it."""

    host: str
    port: int
    token: str

    def get(self, path: str) -> Any:
        """The JSON answer of ``GET /api/v1/<path>``.

        Raises :class:`PeerError` when nothing answers, :class:`OperatorError` when the answer is an error.
        """
        return self._ask("GET", path, None)

    def post(self, path: str, value: Any) -> Any:
        """The JSON answer of ``POST /api/v1/<path>`` with this value. Raises as :meth:`get` does."""
        return self._ask("POST", path, json.dumps(value))

    def _ask(self, method: str, path: str, body_sent: str | None) -> Any:
        address = f"{self.host}:{self.port}"
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_TIMEOUT_S)
        try:
            headers = {"authorization": f"Bearer {self.token}", "content-type": "application/json"}
            connection.request(method, f"/api/v1/{path}", body_sent, headers)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as failed:
            reason = getattr(failed, "strerror", None) or str(failed) or type(failed).__name__
            raise PeerError(
                f"admin API at {address}", f"does not answer: {reason}", "check that llmgw server runs, and --admin"
            ) from failed
        finally:
            connection.close()
        try:
            value = json.loads(body)
        except ValueError as failed:
            raise PeerError(
                f"admin API at {address}", f"answered {answer.status} and no JSON", "is it an llmgw server? see --admin"
            ) from failed
        if answer.status != 200:
            said = value.get("error", {}) if isinstance(value, dict) else {}
            raise OperatorError(
                f"admin API at {address}", said.get("reason", f"answered {answer.status}"), said.get("remedy", "")
            )
        return value


def connect(admin: str | None, token_file: Path | None, config: Path | None) -> AdminClient:
    """Find the admin listener and the token: from the options, else from ``server.yaml``."""
    if config is None and (admin is None or token_file is None):
        config = next((path for path in _DEFAULT_CONFIGS if path.exists()), None)
        if config is None:
            raise OperatorError(
                "llmgw ctl",
                "it is not said which control plane to ask",
                "name its server.yaml with --config, or give --admin http://HOST:PORT and --token-file FILE",
            )
    host, port = "", 0
    if config is not None:
        server = server_config(config)
        host, port = server.admin.listen.host, server.admin.listen.port
        token_file = token_file or Path(server.state_dir) / TOKEN_FILE
    if admin is not None:
        parts = urlsplit(admin if "//" in admin else f"http://{admin}")
        if parts.scheme != "http" or not parts.hostname:
            raise OperatorError("--admin", f"expected http://HOST:PORT, found {admin}")
        host, port = parts.hostname, parts.port or 8001
    assert token_file is not None
    return AdminClient({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port, read_token(token_file))
