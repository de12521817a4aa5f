from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.engines.activity import Activity, activity
from llmgw.settings.catalog import EngineKind

K = EngineKind


@pytest.mark.parametrize(
    ("kind", "page", "found"),
    [
        (
            K.VLLM,
            'vllm:num_requests_running{engine="0",model_name="m"} 2.0\nvllm:generation_tokens_total{engine="0"} 10.0\n',
            Activity(2, 10),
        ),
        (
            K.SGLANG,
            "sglang:num_running_reqs 1.0\nsglang:generation_tokens_total 4\nsglang:prompt_tokens_total 6\n",
            Activity(1, 10),
        ),
        (
            K.LLAMACPP,
            "llamacpp:requests_processing 1\nllamacpp:tokens_predicted_total 7\nllamacpp:n_decode_total 5\n",
            Activity(1, 12),
        ),
        (K.VLLM, "vllm:num_requests_running 2.0\n", None),
        (K.VLLM, "vllm:generation_tokens_total 10.0\n", None),
        (K.VLLM, "sglang:num_running_reqs 1.0\nsglang:generation_tokens_total 4\n", None),
        (K.VLLM, "vllm:num_requests_running NaN\nvllm:generation_tokens_total 10\n", None),
        (K.VLLM, "vllm:num_requests_running_more 2\nvllm:generation_tokens_total 10\n", None),
    ],
)
def test_pages(kind: EngineKind, page: str, found: Activity | None) -> None:
    assert activity(kind, page) == found


def test_ranks_are_summed_and_steps_count() -> None:
    page = "".join(
        f'# TYPE x gauge\nvllm:num_requests_running{{engine="{n}"}} 1.0\nvllm:generation_tokens_total{{engine="{n}"}} 5.0 1733000000000\n'
        f'vllm:iteration_tokens_total_count{{engine="{n}"}} 1e1\n'
        for n in range(2)
    )
    assert activity(K.VLLM, page) == Activity(2, 30)


@given(
    st.sampled_from(EngineKind),
    st.text()
    | st.lists(
        st.sampled_from(["vllm:num_requests_running 1", "x{", "} 1", "\x00", "vllm:generation_tokens_total 1e999"])
    ).map("\n".join),
)
def test_any_page(kind: EngineKind, page: str) -> None:
    activity(kind, page)


def test_a_large_page_takes_no_time() -> None:
    began = time.process_time()
    activity(K.VLLM, 'vllm:num_requests_running{a="' * 100_000 + "\n" + "x 1\n" * 300_000)
    assert time.process_time() - began < 3
