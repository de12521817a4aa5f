"""TLS for the router's own port in a benchmark."""

from __future__ import annotations

import os
import shutil
import ssl
from pathlib import Path

from llmgw.settings.daemon import RouterTls
from tests.link.samples import make_pki


def front_tls(folder: Path) -> tuple[RouterTls, ssl.SSLContext]:
    """A certificate for ``localhost`` and its key, and a client that trusts it."""
    pki = make_pki(folder)
    files = RouterTls(str(folder / "cert.pem"), str(folder / "key.pem"))
    shutil.copy(pki.server.certificate, files.certificate)
    shutil.copy(pki.server.key, files.key)
    os.chmod(files.key, 0o600)
    trusting = ssl.create_default_context(cafile=pki.server.ca)
    trusting.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    return files, trusting
