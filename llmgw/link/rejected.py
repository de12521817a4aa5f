"""What a TLS alert against our certificate means: the alert's name says little, our own certificate the rest."""

from __future__ import annotations

from collections.abc import Sequence

from cryptography import x509

from llmgw.link.authority import fingerprint
from llmgw.link.identity import CLIENT_AUTH, SERVER_AUTH, read
from llmgw.link.messages import Refused
from llmgw.link.trust import anchor

_ANEW = "get one for this node from the cluster's own CA: llmgw agent join, or llmgw ca issue --node ID --out DIR"


def rejected(own: Sequence[x509.Certificate], pinned: Sequence[x509.Certificate], alert: str) -> Refused:
    """The refusal that a control plane could only make as an alert.

    ``own`` is the chain that we showed, leaf first, ``pinned`` the CAs that we trust: the control plane's own
    certificate led to one of those.
    """
    leaf = read(own[0])
    said = f"TLS alert '{alert}'"
    if CLIENT_AUTH not in leaf.usages and leaf.usages:
        what = "a control plane's certificate" if SERVER_AUTH in leaf.usages else "a certificate"
        found = f"{what} for {', '.join(leaf.usages)}; {said}"
        return Refused("usage", CLIENT_AUTH, found, str(leaf), _ANEW)
    ours = f"issuer {leaf.issuer}, {_issuer(own)}"
    wanted = "a certificate from a CA in the control plane's bundle; pinned on this node: " + "; ".join(
        f"{c.subject.rfc4514_string()}, SHA-256 {fingerprint(c)}" for c in pinned
    )
    if anchor(own, pinned) is not None:
        why = "the CA is the pinned one, so it is the control plane's bundle or this certificate that is wrong"
        return Refused("certificate", wanted, f"{ours}; {said}", str(leaf), f"{why}: {_ANEW}")
    return Refused("issuer", wanted, f"{ours}, which is none of the pinned ones; {said}", str(leaf), _ANEW)


def _issuer(own: Sequence[x509.Certificate]) -> str:
    if len(own) > 1:
        return f"SHA-256 {fingerprint(own[1])}"
    try:
        key = own[0].extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
    except (ValueError, x509.ExtensionNotFound):
        key = None
    return "which is not in its file" if key is None else f"key id {key.hex()}"
