from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.router.usage import own_error, usage_of


def test_found_in_streams_and_whole_answers() -> None:
    block = b'"usage":{"prompt_tokens":7,"completion_tokens":3,"details":{"a":{"b":1}}}'
    assert usage_of(b'data: {"choices":[],' + block + b"}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n") == (7, 3)
    assert usage_of(b'{"id":1,"usage": {"prompt_tokens": 5, "total_tokens": 5}}') == (5, 0)
    huge = b'{"usage":{"prompt_tokens":123456789012345678901234567890,"completion_tokens":1}}'
    assert usage_of(huge) == (123456789012345678901234567890, 1)
    assert usage_of(b'{"usage":{"input_tokens":2,"output_tokens":1}}') == (2, 1)


def test_the_last_one_counts_and_none_is_none() -> None:
    assert usage_of(
        b'"usage":{"prompt_tokens":1,"completion_tokens":1} "usage":{"prompt_tokens":9,"completion_tokens":8}'
    ) == (9, 8)
    for tail in (
        b"",
        b'"usage":null',
        b'"usage":{"prompt',
        b'"usage":{"prompt_tokens":"x"}',
        b'"usage":{"prompt_tokens":-1}',
    ):
        assert usage_of(tail) is None


@pytest.mark.parametrize(
    ("tail", "error"),
    [
        (b'data: {"error": {"message": "EngineCore died"}}\n\n\r\n5\r\ndata: [DONE]\n\n', True),
        (b'data: {"object": "error", "message": "died"}\n\n', True),
        (b'event: error\ndata: {"type": "error", "error": {"type": "api_error", "message": "died"}}\n\n', True),
        (b'event: response.failed\ndata: {"type":"response.failed","response":{}}\n\n', True),
        (b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\n\r\n5\r\ndata: [DONE]\n\n', True),
        (b'data: {"choices":[{"delta":{},"finish_reason": "error"}]}\n\ndata: [DONE]\n\n', True),
        (b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\ndata: [DONE]\n\n', False),
        (b'data: {"choices":[{"delta":{"content":"\\"finish_reason\\":\\"abort\\""}}]}\n\ndata: [DONE]\n\n', False),
        (b'data: {"choices":[{"delta":{"content":"data: {\\"error\\": 1}"}}]}\n\ndata: [DONE]\n\n', False),
        (b'event: message_stop\ndata: {"type": "message_stop"}\n\n', False),
    ],
)
def test_errors_of_an_engine_s_own(tail: bytes, error: bool) -> None:
    assert own_error(tail) is error


@given(st.binary(max_size=200))
def test_any_tail(tail: bytes) -> None:
    usage_of(b'"usage":' + tail)
