"""The files that a node shows and trusts: those that agent.yaml names, or what came over the link since.

What comes over the link is kept in ``identity/`` of the state folder: ``renewed.pem`` with certificate and key, and
``ca.pem``, each replaced as a whole. Each says in its first line which file of the operator's it stands in for, by
SHA-256: as soon as the operator puts another one there, that one counts.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from attrs import evolve
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from llmgw.errors import OperatorError
from llmgw.link import identity, keyfile
from llmgw.link.authority import certificates, fingerprint, key_pem
from llmgw.link.identity import Certificate
from llmgw.settings.daemon import TlsFiles

_MARK = b"# in place of sha256:"


class OwnFiles:
    """Where a node's identity is. Every method reads what is there now, and blocks for that."""

    def __init__(self, tls: TlsFiles, state_dir: Path) -> None:
        self._named = tls
        self._folder = state_dir / "identity"

    def files(self) -> TlsFiles:
        """What to connect with. Raises :class:`OperatorError` when a file that is named cannot be read."""
        made = self._named
        renewed, bundle = self._folder / "renewed.pem", self._folder / "ca.pem"
        if _stands_for(renewed, Path(made.certificate)):
            made = evolve(made, certificate=str(renewed), key=str(renewed))
        if _stands_for(bundle, Path(made.ca)):
            made = evolve(made, ca=str(bundle))
        return made

    def certificate(self) -> Certificate:
        """What our own certificate says. Raises :class:`OperatorError`."""
        path = self.files().certificate
        return identity.read(certificates(keyfile.read(Path(path)), path)[0])

    def cas(self) -> tuple[x509.Certificate, ...]:
        """The CAs that we trust. Raises :class:`OperatorError`."""
        path = self.files().ca
        return certificates(keyfile.read(Path(path)), path)

    def renewed(self, chain: str, key: ec.EllipticCurvePrivateKey) -> None:
        """Use this certificate and key from now on. Raises :class:`OperatorError`; then nothing has changed."""
        data = _mark(Path(self._named.certificate)) + chain.encode() + key_pem(key)
        keyfile.replace(self._made() / "renewed.pem", data, 0o600)

    def trust(self, bundle: str) -> bool:
        """Trust these CAs from now on; whether they are others. Raises :class:`OperatorError`."""
        new = certificates(bundle.encode(), "the CA bundle")
        if {fingerprint(c) for c in new} == {fingerprint(c) for c in self.cas()}:
            return False
        keyfile.replace(self._made() / "ca.pem", _mark(Path(self._named.ca)) + bundle.encode(), 0o644)
        return True

    def check(self) -> None:
        """Raise :class:`OperatorError`, with file and fix, if others could reach a key or what came by the link."""
        for path in (Path(self._named.key), self._folder, self._folder / "renewed.pem"):
            if path.exists():
                keyfile.check_private(path)

    def installation(self) -> str:
        """A name for this state folder, made once: tells an agent that was started again from a second one."""
        path = self._made() / "installation"
        if not path.exists():
            keyfile.replace(path, f"{secrets.token_hex(16)}\n".encode(), 0o600)
        return keyfile.read(path).decode(errors="replace").strip()[:64]

    def _made(self) -> Path:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as failed:
            raise OperatorError(
                str(self._folder), f"cannot be made: {failed.strerror}", "check the disk and the state folder"
            ) from failed
        keyfile.check_private(self._folder)
        return self._folder


def _mark(named: Path) -> bytes:
    return _MARK + hashlib.sha256(keyfile.read(named)).hexdigest().encode() + b"\n"


def _stands_for(path: Path, named: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.readline() == _mark(named)
    except FileNotFoundError:
        return False
    except OSError as failed:
        raise OperatorError(str(path), f"cannot be read: {failed.strerror}", "check its mode and owner") from failed
