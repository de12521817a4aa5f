"""The engine's cgroup, where the agent was given a part of the tree (:mod:`llmgw.agent.cgroup`)."""

import contextlib
import os


def write_to(path: str, text: str) -> bool:
    """Write to a file of the kernel's; whether it took it."""
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError:
        return False
    return True


class Cgroup:
    """The engine's cgroup, or none: everything here works without one as well."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.made = False
        self.entered = False

    def enter(self) -> None:
        """Make it and go into it: what is started now begins its life there. :attr:`entered` says whether it did."""
        if self.path:
            with contextlib.suppress(OSError):
                os.mkdir(self.path, 0o755)
                self.made = True
                self.entered = write_to(f"{self.path}/cgroup.procs", "0")

    def leave(self) -> None:
        """Back to where we came from; the engine stays."""
        if self.made:
            write_to(f"{os.path.dirname(self.path)}/cgroup.procs", "0")

    def kill(self) -> None:
        """SIGKILL all that is in it; kernels before 5.14 cannot, and what is in reach is signalled anyway."""
        if self.made:
            write_to(f"{self.path}/cgroup.kill", "1")

    def remove(self) -> None:
        """Take it away, if it is empty."""
        if self.made:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
