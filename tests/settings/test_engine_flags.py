from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.settings.catalog import EngineKind
from llmgw.settings.engine_flag_tables import TABLES, VERSIONS
from llmgw.settings.engine_flags import argument_faults, arity, canonical, choices, newest, version_key
from llmgw.settings.profile_rules import owned_flag, vouched_flag

FLAGS = Path(__file__).resolve().parents[3] / "shared" / "engines" / "flags"
K = EngineKind


def said(
    kind: EngineKind, *arguments: str, version: str | None = None, vouched: tuple[str, ...] = ()
) -> list[tuple[int, str]]:
    return [(at, problem) for at, problem, _ in argument_faults(kind, arguments, vouched, version)]


def test_versions_compare_by_their_numbers() -> None:
    texts = ["0.4.6.post5", "0.5.2", "0.5.6", "0.5.6.post2", "0.5.12", "0.32.0+cpu", "0.33.0"]
    assert sorted(texts, key=version_key) == texts
    assert version_key("b11434") == (11434,)
    assert (newest(K.VLLM), newest(K.LLAMACPP)) == ("0.33.0", "b11434")


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("--max_num_seqs=8", "--max-num-seqs"),
        ("--compilation-config.level", "--compilation-config"),
        ("-O3", "-O"),
        ("-O.level=3", "-O"),
        ("--seed", "--seed"),
    ],
)
def test_vllm_s_ways_of_writing(argument: str, name: str) -> None:
    assert canonical(K.VLLM, argument) == name
    assert canonical(K.SGLANG, "--max_x") == "--max_x"


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (None, None),
        ("0.11.2", None),
        ("0.16.0", None),
        ("0.18.1", None),  # between 0.16.0, which has it, and 0.20.2, which has not
        ("0.20.2", "vllm 0.20.2 has no --swap-space: its last version is 0.16.0"),
        ("0.99.0", "vllm 0.99.0 has no --swap-space: its last version is 0.16.0"),
        ("0.5.0", None),  # before the first that is known
    ],
)
def test_an_argument_that_was_removed(version: str | None, problem: str | None) -> None:
    assert said(K.VLLM, "--swap-space", "4", version=version) == ([] if problem is None else [(0, problem)])


def test_an_argument_that_came_later_and_one_that_came_back() -> None:
    assert said(K.VLLM, "--device-id", "0", version="0.11.2")[0][1].startswith("vllm 0.11.2 has no --device-id")
    assert said(K.SGLANG, "--attn-dp-size", "2", version="0.5.9") == [
        (0, "sglang 0.5.9 has no --attn-dp-size: it came by 0.5.22")
    ]
    assert said(K.VLLM, "--disable-log-requests", version="0.28.0") == [
        (0, "vllm 0.28.0 has no --disable-log-requests: it came by 0.33.0")
    ]
    assert said(K.VLLM, "--disable-log-requests", version="0.33.0") == []


@pytest.mark.parametrize(
    ("kind", "arguments", "version", "problem"),
    [
        (K.SGLANG, ["--quantization", "mxfp8"], "0.5.2", "sglang 0.5.2 does not take 'mxfp8' for --quantization: it came by 0.5.9"),
        (K.SGLANG, ["--quantization=marlin"], "0.5.23", "sglang 0.5.23 does not take 'marlin' for --quantization: its last version is 0.5.19"),
        (K.SGLANG, ["--quantization", "mxfp8"], "0.5.7", None),  # between 0.5.6.post2, which has it not, and 0.5.9
        (K.SGLANG, ["--quantization", "mxfp8"], None, None),
        (K.SGLANG, ["--quantization", "mxfp9"], None, "no version of sglang up to 0.5.23 takes 'mxfp9' for --quantization"),
        (K.SGLANG, ["--quantization", "mxfp9"], "0.6.0", None),
        (K.SGLANG, ["--lora-target-modules", "all", "nose"], "0.5.23", "sglang 0.5.23 does not take 'nose' for --lora-target-modules"),
        (K.VLLM, ["--quantization", "anything"], "0.33.0", None),  # its plugins bring more
        (K.VLLM, ["--kv_cache_dtype", "int4_per_token_head"], "0.24.0",
         "vllm 0.24.0 does not take 'int4_per_token_head' for --kv-cache-dtype: it came by 0.27.1"),
        (K.VLLM, ["--kv-cache-dtype", "of-a-plugin"], "0.33.0", None),  # the only one that lists none
        (K.LLAMACPP, ["-fa", "1", "--split-mode", "diagonal"], "b11434", "llamacpp b11434 does not take 'diagonal' for --split-mode"),
    ],
)  # fmt: skip
def test_a_value_that_a_version_does_not_offer(
    kind: EngineKind, arguments: list[str], version: str | None, problem: str | None
) -> None:
    assert [p for _, p in said(kind, *arguments, version=version)] == ([] if problem is None else [problem])


def test_between_two_versions_an_argument_of_either_will_do() -> None:
    assert said(K.VLLM, "--device-ids", "0", version="0.20.2") != []
    assert said(K.VLLM, "--device-ids", "0", version="0.22.1") == []
    assert said(K.VLLM, "--device-ids", "0", version="0.24.0") == []


def test_what_a_version_beyond_the_tables_may_have_is_let_pass() -> None:
    assert said(K.VLLM, "--from-the-future", "1", "--seed", "7", version="0.40.0") == []
    assert said(K.VLLM, "--from-the-future", "1", version="0.33.0") != []


def test_values_are_not_taken_for_arguments() -> None:
    assert said(K.VLLM, "--seed", "-1") == []
    assert said(K.VLLM, "--allowed-media-domains", "-1", "-.5", "--seed=1") == []
    assert said(K.VLLM, "--allowed-media-domains", "a", "b", "--seed=1") == []
    assert said(K.VLLM, "--enable-lora", "yes") == [(1, "'yes' belongs to no argument")]
    assert said(K.VLLM, "--seed") == [(0, "--seed needs a value")]
    assert said(K.VLLM, "-") == [(0, "'-' belongs to no argument")]
    assert said(K.VLLM, "--hf-overrides", '{"a": 1}', "--compilation-config.level", "3", "-O3") == []


def test_several_faults_at_once_and_none_hides_the_next() -> None:
    assert [at for at, _ in said(K.VLLM, "--nope", "x", "--seed", "1", "stray", "--also-nope")] == [0, 4, 5]


@given(st.sampled_from(EngineKind), st.lists(st.text(max_size=12) | st.sampled_from(["--seed", "-1", "--x=1", "-O3"]), max_size=6),
       st.none() | st.text(max_size=8) | st.sampled_from(["0.11.2", "0.5.2", "b11434", "9"]))  # fmt: skip
def test_any_arguments(kind: EngineKind, arguments: list[str], version: str | None) -> None:
    for at, problem, remedy in argument_faults(kind, arguments, (), version):
        assert 0 <= at < len(arguments)
        assert problem
        assert remedy


@pytest.mark.skipif(not FLAGS.exists(), reason="no tables here")
@pytest.mark.parametrize(("engine", "kind"), [("vllm", K.VLLM), ("sglang", K.SGLANG), ("llama", K.LLAMACPP)])
def test_the_tables_are_those_of_the_published_versions(engine: str, kind: EngineKind) -> None:
    everything = {n.rstrip("=+*?") for names in TABLES[kind.value].values() for n in names.split()}
    read = set()
    for version in VERSIONS[kind.value]:
        with (FLAGS / f"flags-{engine}-{version}.tsv").open() as file:
            there = {row["flag"]: row for row in csv.DictReader(file, delimiter="\t") if row["flag"].startswith("-")}
        read |= set(there)
        for flag, row in there.items():
            follows = arity(kind, flag, version)
            assert follows is not None, (version, flag)
            assert (follows == "") == (row["nargs"] == "0" or row["type"] == "flag"), (version, flag)
            offered = choices(kind, flag, version)
            if kind is K.LLAMACPP:
                # Its help names one word for yes and one for no; numbers are read as numbers.
                assert row["choices"] in ("", "0|1") or set(row["choices"].split("|")) <= set(offered or ()), flag
            elif row["type"] in ("str", "str?", "int"):  # what is made something else of first may be written otherwise
                assert "|".join(offered or ()) == row["choices"], (version, flag)
            else:
                assert offered is None, (version, flag)
        for flag in everything - set(there):
            assert arity(kind, flag, version) is None, (version, flag)
    assert read == everything


@pytest.mark.parametrize("kind", EngineKind)
def test_an_argument_in_full_is_no_other_ones_beginning(kind: EngineKind) -> None:
    """``--reasoning-parser`` takes no word for ``--reasoning-parser-plugin``, whose beginning does."""
    for names in TABLES[kind.value].values():
        for flag in (name.rstrip("=+*?") for name in names.split()):
            assert {owned_flag(kind, flag), vouched_flag(kind, flag)} <= {flag, None}
    if kind is EngineKind.VLLM:
        assert vouched_flag(kind, "--reasoning-parser") is None
        assert vouched_flag(kind, "--reasoning-parser-p") == "--reasoning-parser-plugin"
