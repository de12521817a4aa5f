"""An agent that is killed while it writes a new identity comes back with the old one or the new one, never none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from llmgw.link import ca
from llmgw.link.own import OwnFiles
from llmgw.settings.daemon import TlsFiles

_NOW = time.time()

_CHILD = """
import os, signal, sys
from pathlib import Path
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from llmgw.link.own import OwnFiles
from llmgw.settings.daemon import TlsFiles

certificate, key, bundle, state, chain, fresh = sys.argv[1:7]
own = OwnFiles(TlsFiles(ca=bundle, certificate=certificate, key=key), Path(state))
text, made = Path(chain).read_text(), load_pem_private_key(Path(fresh).read_bytes(), None)
widened = Path(sys.argv[7]).read_text()

def attempt(n):
    seen = 0
    def step(frame, event, what):
        nonlocal seen
        if not frame.f_code.co_filename.endswith(("durable.py", "keyfile.py", "own.py", "_local.py", "pathlib.py")):
            return
        seen += 1
        if seen == n:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(step)
    own.trust(widened)
    own.renewed(text, made)
    own.installation()
    sys.setprofile(None)

n = 0
while True:
    n += 1
    child = os.fork()
    if child == 0:
        attempt(n)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(n, status, flush=True)
    if sys.stdin.readline() != "on\\n":
        break
"""


def _usable(own: OwnFiles) -> int:
    """The serial of the identity that a restarted agent would use; its key must fit and its files be private."""
    own.check()
    own.installation()
    assert own.cas()
    files = own.files()
    leaf = x509.load_pem_x509_certificate(Path(files.certificate).read_bytes())
    key = load_pem_private_key(Path(files.key).read_bytes(), None)
    assert key.public_key() == leaf.public_key()
    return leaf.serial_number


@pytest.mark.long
def test_a_kill_at_every_step_of_writing_leaves_a_usable_identity(tmp_path: Path) -> None:
    ca.init(tmp_path / "ca", "t.example", _NOW)
    named = ca.issue_node(tmp_path / "ca", "n1", tmp_path / "out", 30, _NOW)
    ca.init(tmp_path / "other", "t.example", _NOW)
    widened = tmp_path / "widened.pem"
    widened.write_bytes(Path(named.ca).read_bytes() + (tmp_path / "other" / "root.pem").read_bytes())
    fresh = ca.issue_node(tmp_path / "ca", "n1", tmp_path / "fresh", 30, _NOW)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    own = OwnFiles(TlsFiles(ca=named.ca, certificate=named.certificate, key=named.key), state)
    old, new = _usable(own), x509.load_pem_x509_certificate(Path(fresh.certificate).read_bytes()).serial_number
    made = state / "identity"
    arguments = (named.certificate, named.key, named.ca, state, fresh.certificate, fresh.key, widened)
    killed, serials = 0, set()
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for line in child.stdout:
            status = int(line.split()[1])
            serials.add(_usable(own))
            if status == 0:
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            killed += 1
            left = [p for p in made.iterdir() if p.name.startswith(".")]
            assert len(left) <= 1, "what killed writers leave piles up"
            assert all(p.stat().st_mode & 0o077 == 0 or p.name.startswith(".ca.") for p in left)
            for name in ("renewed.pem", "ca.pem"):
                (made / name).unlink(missing_ok=True)
            child.stdin.write("on\n")
            child.stdin.flush()
        child.stdin.close()
    assert killed > 60
    assert serials == {old, new}
    assert [p.name for p in made.iterdir() if p.name.startswith(".")] == []
