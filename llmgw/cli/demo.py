"""``llmgw demo``: the whole system on this machine, in a minute."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from llmgw.cli.demo_files import Demo, DemoEngine, find_engine, prepare, remove
from llmgw.cli.demo_run import DemoRun, interruptible
from llmgw.cli.terminal import echo
from llmgw.web.auth import TOKEN_FILE, read_token


@click.command(name="demo")
@click.option("--check", is_flag=True,
              help="Send requests, kill the agent, restart it, verify all of it, and exit with 0.")  # fmt: skip
@click.option("--engine", metavar="PROGRAM",
              help="llama-server, vllm (a CPU build) or fake. [default: a real one on the PATH, or fake]")  # fmt: skip
@click.option("--dir", "folder", type=click.Path(path_type=Path),
              help="Folder to make everything in, kept afterwards. [default: a temporary one]")  # fmt: skip
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the router. [default: a free one]")
def command(check: bool, engine: str | None, folder: Path | None, port: int | None) -> None:
    """Run a control plane, a node's agent and engines on this machine.

    Makes a CA, certificates and commented configuration files, then starts a real `llmgw server` and a real
    `llmgw agent` that talk over mutual TLS. The GPUs are a fake machine's and the output says so. Ctrl-C stops
    everything and leaves no process.
    """
    began = time.monotonic()

    def say(subject: str, text: str) -> None:
        echo(f"{time.monotonic() - began:5.1f} s  {subject:<9}  {text}")

    chosen = find_engine(engine)
    with _folder(folder) as place, interruptible():
        demo = prepare(place, chosen, port)
        say("demo", f"folder {demo.folder}")
        say("engine", chosen.label)
        say("files", "local CA, certificates for server and node, server.yaml, agent.yaml, settings.yaml")
        run = DemoRun(demo, say)
        stopped_by_user = False
        try:
            run.start_server()
            run.start_agent()
            run.wait("every replica to be ready", 300.0 if chosen.kind is DemoEngine.VLLM else 60.0, run.all_ready)
            _show_addresses(demo)
            if check:
                from llmgw.cli.demo_check import check as verify

                verify(run)
            else:
                while True:
                    run.follow()
                    time.sleep(0.5)
        except KeyboardInterrupt:
            stopped_by_user = True
        finally:
            # A second Ctrl-C must not leave engines behind: stopping is bounded anyway.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say("demo", f"everything stopped in {run.stop():.1f} s")
    if check and not stopped_by_user:
        say("check", "passed")
    if check and stopped_by_user:
        sys.exit(130)


@contextlib.contextmanager
def _folder(named: Path | None) -> Iterator[Path]:
    if named is not None:
        yield named.resolve()
        return
    place = Path(tempfile.mkdtemp(prefix="llmgw-demo-"))
    try:
        yield place
    finally:
        remove(place)


def _show_addresses(demo: Demo) -> None:
    token = read_token(demo.server_state / TOKEN_FILE)
    url = f"http://127.0.0.1:{demo.router_port}"
    admin = f"http://127.0.0.1:{demo.admin_port}"
    body = f'{{"model": "{demo.models[0]}", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'
    echo(f"""
  Try it:
    curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'

  Router    {url}/v1        metrics {url}/metrics
  Console   {admin}/#token={token}
  Metrics   {admin}/metrics        (control plane)
  Ask it    llmgw ctl --config {demo.server_yaml} status
""")
