"""A whole fleet in one process and in virtual time: the real control plane and link, simulated nodes and engines.

python -m fakes.fleet --seed N
"""

from .kit import Kit
from .outcome import Outcome
from .run import run

__all__ = ["Kit", "Outcome", "run"]
