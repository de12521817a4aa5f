"""A whole fleet in one process and in virtual time: the real control plane and link, simulated nodes and engines.

python -m fakes.fleet --seed N
"""

from .plan import Plan, make_plan
from .run import Outcome, run

__all__ = ["Outcome", "Plan", "make_plan", "run"]
