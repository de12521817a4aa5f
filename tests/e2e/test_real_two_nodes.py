"""One replica over two nodes with vLLM's CPU build: two agents on this machine, whose ranks meet over loopback."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fakes import tiny_model
from llmgw.cli.demo_files import DemoEngine, Engine
from tests.e2e.real import Keeper, Real, members, program, real, listening

pytestmark = pytest.mark.real_engine

LAYERS = int(os.environ.get("XL", "2"))


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    folder = tmp_path_factory.mktemp("weights")
    tiny_model.write(folder, LAYERS)
    profile = (
        f"weights: {folder / 'hf'}, context_length: 4096, gpus: 1, nodes: 2, tp: 2, "
        "args: [--enforce-eager, --dtype, bfloat16, --max-num-seqs, '8'], "
        "env: {VLLM_CPU_KVCACHE_SPACE: '1', OMP_NUM_THREADS: '1'" + os.environ.get("XENV", "") + "}"
    )
    # Ranks that share /dev/shm take themselves to be on one node and meet on unix sockets: those are in one place too.
    with tempfile.TemporaryDirectory() as sockets:
        vllm = folder / "vllm"
        vllm.write_text(f'#!/bin/sh\nVLLM_RPC_BASE_PATH={sockets} exec {program("LLMGW_TEST_VLLM")} "$@"\n')
        vllm.chmod(0o700)

        def make(folder: Path) -> AbstractContextManager[Real]:
            return real(folder, Engine(DemoEngine.VLLM, str(vllm)), profile, second_at="127.0.0.2")

        kept = Keeper(make, tmp_path_factory)
        yield kept
        kept.close()


@pytest.fixture
def pair(keeper: Keeper, request: pytest.FixtureRequest) -> Iterator[Real]:
    with keeper.lend(request.session) as made:
        yield made


def test_explore(pair: Real) -> None:
    t = time.monotonic()
    seen = pair.start()
    print("ready after", time.monotonic() - t)
    for row in seen:
        print(row["state"], row["reason"], [(s["state"], s["reason"]) for s in row["shards"]])
    print(pair.replica["warnings"])
    for s in pair.replica["shards"]:
        print(s["node"], s["pid"], s["reason"], members(s["pid"]), sorted(listening(members(s["pid"]))))
    t = time.monotonic()
    print(
        pair.system.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=3, timeout=100
        )
    )
    print("3 tokens", time.monotonic() - t)
    print(pair.stream(100).result())
    print("100 tokens", time.monotonic() - t)
    os.system("free -m")
    os.system("ps -eo pid,rss,pss,args 2>/dev/null --sort=-rss | head -12 | cut -c1-100")
    print(pair.engine_logs())
    for which in os.environ.get("XKILL", "").split():
        rank, part, mode = which.split("/")
        shard = pair.replica["shards"][int(rank)]
        g = pair.replica["generation"]
        pids = [s["pid"] for s in pair.replica["shards"]]
        stream = pair.stream(4000) if mode == "s" else None
        if part == "group":
            os.killpg(shard["pid"], signal.SIGKILL)
        else:
            victim = (
                shard["pid"]
                if part == "main"
                else next(p for p, l in members(shard["pid"]).items() if l.startswith(part))
            )
            os.kill(victim, signal.SIGKILL)
        t = time.monotonic()
        said = ""
        while time.monotonic() - t < 100:
            rows = pair.run.replicas()
            now = str([(r["generation"], r["state"], r["reason"][:300]) for r in rows]) + " HEALTH "
            try:
                now += str(pair.ask_engine("/health", with_key=True))
            except Exception as e:
                now += type(e).__name__
            now += str([len(members(p)) for p in pids]) + str(stream and (stream.finish, repr(stream.failure)))
            if now != said:
                print(f"{time.monotonic() - t:.1f} {now}")
                said = now
            if rows and rows[0]["generation"] > g and rows[0]["state"] == "ready":
                break
            time.sleep(0.1)
        print("RESTARTS", pair.decisions("restart", pair.replica["id"]))
        print(pair.stream(10).result())
