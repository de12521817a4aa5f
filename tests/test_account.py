"""Who runs the process, also where that has no name and no home."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys

import pytest

from llmgw.account import account

NAMELESS = """
import os
from llmgw.account import account
from llmgw.cli import contexts
from llmgw.errors import OperatorError
os.setuid(54321)
print(account())
print(len(contexts.load().contexts))
try:
    contexts.save(contexts.Contexts())
except OperatorError as refused:
    print(refused)
"""


def test_the_account_has_its_name() -> None:
    assert account() == getpass.getuser()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become an account that has no name")
def test_a_container_may_run_as_any_number() -> None:
    keep = {
        k: v
        for k, v in os.environ.items()
        if k not in {"LOGNAME", "USER", "LNAME", "USERNAME", "HOME", "XDG_CONFIG_HOME"}
    }
    child = subprocess.run(
        [sys.executable, "-c", NAMELESS], capture_output=True, text=True, env=keep, timeout=60, check=False
    )
    assert child.stdout.splitlines() == [
        "uid 54321",
        "0",
        "contexts.yaml: has no place: uid 54321 has no home folder. set HOME, or XDG_CONFIG_HOME",
    ], child.stderr
