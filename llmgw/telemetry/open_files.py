"""How many files a daemon may have open: a connection is one."""

from __future__ import annotations

import resource

_MOST = 1024 * 1024


def as_many_as_allowed() -> None:
    """Raise the soft limit to the hard one, which the operator set: a shell gives a process 1,024, whatever may be."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, _MOST) if most >= 0 else _MOST, most))
