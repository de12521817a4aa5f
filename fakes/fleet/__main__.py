"""``python -m fakes.fleet --seeds 10000``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import click

from .outcome import Outcome, tell
from .run import run

_CHUNK = 4


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--seeds", type=click.IntRange(1), help="How many seeds to run.  [default: 200, or 1 with --seed]")
@click.option("--seed", type=click.IntRange(0), help="The first seed, or the only one.  [default: 0]")
@click.option(
    "--hours",
    type=click.FloatRange(0, min_open=True),
    help="Virtual hours in which things go wrong, instead of the seed's own 2 to 6.",
)
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Processes.  [default: one a core]")
@click.option("-v", "--verbose", is_flag=True, help="Print the whole trace as it happens; of one seed only.")
def main(seeds: int | None, seed: int | None, hours: float | None, jobs: int, verbose: bool) -> None:
    """Let simulated fleets live through hours of faults, and see that what must hold holds.

    A seed is a fleet, its models, and what goes wrong when: links that break or hang, agents and control planes that
    die, machines that lose their power, engines that crash or hang, cards that fail or are carved anew, settings that
    are edited, users who come and go. Control plane,
    link and agent are the real code; machines, engines and the disk are simulated, and
    time is virtual. Once the faults are over the fleet must come to rest as it is wanted.

    \b
    What must hold:
      one live shard                   no two engines for one slot, nor on one device
      epoch                            no node obeys a control plane that was replaced
      observed converges to desired    every model that fits somewhere is served, nothing else runs
      what has settled stays           nothing is decided any more when nothing happens
      placed as the settings say       labels, taints, quotas, anti-affinity
      one at a time                    an update takes nothing away before the last one serves
      zero without demand              what nobody asks for is not started
      from zero in time                what somebody waits for is
      nothing leaks                    no connection, task, record or engine is left over
      no unexpected error              nothing raised, nothing logged with a traceback

    A seed that fails is printed with what did not hold and its last events, and the exit code is 1. The same seed with
    the same --hours happens again in exactly the same way, on any machine:

    \b
      python -m fakes.fleet --seeds 10000        look for one that fails
      python -m fakes.fleet --seed 4711 -v       see all of what happened in it
    """
    first = seed or 0
    count = seeds if seeds is not None else 200 if seed is None else 1
    if verbose and count > 1:
        raise click.UsageError("-v prints the trace of one seed; give --seed S without --seeds.")
    sys.exit(tell(_outcomes(range(first, first + count), hours, jobs, verbose=verbose), hours, told=verbose))


def _outcomes(seeds: Sequence[int], hours: float | None, jobs: int, *, verbose: bool) -> Iterator[Outcome]:
    one = partial(run, hours=hours, echo=verbose)
    if len(seeds) == 1 or jobs == 1:
        yield from map(one, seeds)
        return
    with ProcessPoolExecutor(min(jobs, len(seeds)), get_context("spawn")) as pool:
        yield from pool.map(one, seeds, chunksize=_CHUNK)


if __name__ == "__main__":
    main()
