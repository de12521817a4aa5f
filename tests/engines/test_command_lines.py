"""Every command line that the adapters can build, for every version whose arguments are known."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given

from llmgw.engines.base import ShardSpec
from llmgw.engines.registry import arguments_of, build
from llmgw.settings.catalog import EngineKind
from llmgw.settings.engine_flag_tables import VERSIONS
from llmgw.settings.engine_flags import argument_faults
from tests.engines.specs import specs

FLAGS = Path(__file__).resolve().parents[3] / "shared" / "engines" / "flags"


def checker() -> Callable[[str, Sequence[str]], list[str]]:
    """The check of a command line against a table of flags, values and choices that comes with the tables."""
    found = importlib.util.spec_from_file_location("check_argv", FLAGS.parent / "check_argv.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return lambda table, argv: list(module.check_table(table, argv))


@pytest.mark.skipif(not FLAGS.exists(), reason="no tables of flags here")
def test_every_version_takes_what_is_built_for_it() -> None:
    check = checker()

    @given(specs())
    def built(made: ShardSpec) -> None:
        launch = build(made)
        name = {EngineKind.VLLM: "vllm", EngineKind.SGLANG: "sglang", EngineKind.LLAMACPP: "llama"}[made.profile.engine]
        version = made.install.version
        tables = sorted(FLAGS.glob(f"flags-{name}-{version or '*'}.tsv"))
        assert tables
        for table in tables:  # of a version that is not known it may be any
            assert check(str(table), arguments_of(made, launch)) == [], table.name

    built()


@given(specs())
def test_every_version_in_our_own_tables_takes_what_is_built(made: ShardSpec) -> None:
    launch = build(made)
    kind, version = made.profile.engine, made.install.version
    for installed in VERSIONS[kind.value] if version is None else [version]:
        assert list(argument_faults(kind, arguments_of(made, launch), (), installed)) == []


@given(specs())
def test_whatever_is_built_names_the_model_and_listens_where_it_was_told(made: ShardSpec) -> None:
    launch = build(made)
    line = " ".join(launch.argv)
    serves = made.rank == 0 or made.profile.engine is not EngineKind.VLLM
    assert ("--host 10.0.0.1 --port 20001" in line) == serves
    assert ("--headless" in launch.argv) == (not serves)
    assert "org/m" in launch.argv
    assert set(launch.env["CUDA_VISIBLE_DEVICES"].split(",")) == {f"GPU-{n}" for n in range(made.profile.gpus)}
    assert ("NCCL_SOCKET_IFNAME" in launch.env) == (made.profile.nodes > 1)
    assert launch.env.get("NCCL_IB_HCA") == ("=mlx5_0:1,mlx5_3:1" if made.fabric and made.fabric.ports else None)
    assert "sk-secret" not in line
    assert "sk-secret" not in str(launch.env)
    for path in made.profile.lora.values():
        assert f"={'' if path.startswith('/') else '/models/'}{path}" in line
