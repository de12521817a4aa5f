"""``llmgw agent join``: a node without a certificate gets one, and a first agent.yaml."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio

from llmgw.cli.terminal import echo
from llmgw.errors import OperatorError
from llmgw.settings.daemon import Address

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

    from llmgw.link.messages import Joined

_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s\[\]:/]+)):([0-9]{1,5})")


def _address(_ctx: click.Context, _param: click.Parameter, value: str) -> Address:
    match = _ADDRESS.fullmatch(value)
    if match is None or not 0 < int(match[3]) <= 65535:
        raise click.BadParameter(f"{value} is not HOST:PORT")
    return Address(match[1] or match[2], int(match[3]))


@click.command()
@click.argument("token")
@click.option("--server", required=True, callback=_address, metavar="HOST:PORT",
              help="The control plane's link listener; HOST must be in its certificate.")  # fmt: skip
@click.option("--node", default="", metavar="ID", help="Only join as this node. [default: whoever the token is for]")
@click.option("--out", type=click.Path(path_type=Path),
              help="Folder for key, certificate and CA bundle. [default: identity/ beside agent.yaml]")  # fmt: skip
@click.option("--state-dir", default="/var/lib/llmgw-agent", show_default=True, help="For a new agent.yaml.")
@click.option("--address", help="For a new agent.yaml: where the router reaches this node. "
              "[default: the address from which it reaches the control plane]")  # fmt: skip
@click.pass_obj
def join(
    config: Path, token: str, server: Address, node: str, out: Path | None, state_dir: str, address: str | None
) -> None:
    """Join a cluster with a token of `llmgw ctl token create`; - reads it from standard input.

    The key is made here and never leaves this machine. The control plane is known by the CA that the token names
    before the token is said. A first agent.yaml is written where --config points, if there is none. Should an answer
    be lost, run the same command again.
    """
    from llmgw.link import joining, keyfile, tokens
    from llmgw.link.authority import request_for
    from llmgw.link.identity import key_sha256

    parsed = tokens.parse(sys.stdin.readline() if token == "-" else token)  # noqa: S105 - no secret
    folder = (out or config.resolve().parent / "identity").resolve()
    if (folder / "cert.pem").exists():
        raise OperatorError(
            str(folder), "holds a certificate already, and keys are never overwritten", "name a new folder with --out"
        )
    key = _key(folder)
    joined = trio.run(joining.ask, server, parsed, request_for(key), node, time.time())
    chain = joining.check_joined(joined, key_sha256(key.public_key()), node)
    keyfile.replace(folder / "ca.pem", joined.bundle.encode(), 0o644)
    keyfile.write_new(folder / "cert.pem", joined.certificate.encode(), 0o644)  # last: with it the folder is complete
    ends = chain[0].not_valid_after_utc.strftime("%Y-%m-%d %H:%M UTC")
    echo(f"joined as {joined.node}; certificate in {folder}, until {ends}; the agent renews it")
    if config.exists():
        echo(f"{config} is there already; it needs, besides what it has:\n{_identity_yaml(joined, server, folder)}")
        return
    text = _identity_yaml(joined, server, folder) + _node_yaml(state_dir, address or _own_address(server))
    keyfile.write_new(config, text.encode(), 0o644)
    echo(f"wrote {config}; say which engines this node has, then: llmgw agent --config {config}")


def _key(folder: Path) -> ec.EllipticCurvePrivateKey:
    """This node's key: the one that an earlier try has left, or a new one, on the disk before anybody hears of it."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    from llmgw.link import keyfile
    from llmgw.link.authority import key_pem, new_key

    path = folder / "key.pem"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as failed:
        raise OperatorError(str(folder), f"cannot be made: {failed.strerror}", "name another with --out") from failed
    keyfile.check_private(folder)
    if not path.exists():
        key = new_key()
        keyfile.write_new(path, key_pem(key), 0o600)
        return key
    try:
        there = serialization.load_pem_private_key(keyfile.read_private(path), None)
    except (ValueError, TypeError) as wrong:
        raise OperatorError(str(path), f"is no key: {wrong}", "remove it, or name another --out") from wrong
    if not isinstance(there, ec.EllipticCurvePrivateKey):
        raise OperatorError(str(path), "is no P-256 key", "remove it, or name another --out")
    return there


def _own_address(server: Address) -> str:
    """The address from which this machine reaches the control plane; nothing is sent for that."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as asked:
            asked.connect(target)
            return str(asked.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _identity_yaml(joined: Joined, server: Address, folder: Path) -> str:
    return (
        f"id: {json.dumps(joined.node)}\n"
        f"control_planes: [{json.dumps(str(server))}]\n"
        f"trust_domain: {json.dumps(joined.trust_domain)}\n"
        "tls:\n"
        f"  certificate: {json.dumps(str(folder / 'cert.pem'))}\n"
        f"  key: {json.dumps(str(folder / 'key.pem'))}\n"
        f"  ca: {json.dumps(str(folder / 'ca.pem'))}\n"
    )


def _node_yaml(state_dir: str, address: str) -> str:
    return (
        f"state_dir: {json.dumps(state_dir)}\n"
        f"address: {json.dumps(address)}   # where the router reaches this node's engines\n"
        "# engines:\n"
        "#   vllm: [/opt/vllm/bin/vllm, serve]\n"
    )
