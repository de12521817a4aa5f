"""Token counts from the end of an engine's answer: its own ``usage`` block. Pure."""

from __future__ import annotations

import json
import re

import msgspec

TAIL_BYTES = 4096
"""How much of an answer's end is kept to look for the block in; it is the last thing in it but ``[DONE]``."""

_DECODER = json.JSONDecoder()

_FLAT = re.compile(rb'"usage"\s*:\s*(\{[^{}]*\})')
"""A block without objects in it, which most are: it can be cut out and read in C."""


class _Flat(msgspec.Struct):
    prompt_tokens: int = -1
    completion_tokens: int = -1


_decode_flat = msgspec.json.Decoder(_Flat).decode
_ERROR = re.compile(
    rb'data:\s*\{\s*"(?:error"\s*:|object"\s*:\s*"error"|type"\s*:\s*"(?:error|response\.failed)")'
    rb'|"finish_reason"\s*:\s*"(?:abort|error)"'
)


def own_error(tail: bytes) -> bool:
    """Whether a stream ended with the engine's own word, in any of the APIs, that it did not get to its end: an error
    event, which vLLM sends when it crashes and then a ``[DONE]`` as if all were well, or a reason to finish that no
    client asked for, which vLLM and SGLang give for what they break off when they are stopped."""
    return _ERROR.search(tail) is not None


def usage_of(tail: bytes) -> tuple[int, int] | None:
    """Prompt and completion tokens, or ``None`` where the engine did not say."""
    at = tail.rfind(b'"usage"')
    if at < 0:
        return None
    if (flat := _FLAT.match(tail, at)) is not None:
        try:
            block = _decode_flat(flat[1])
        except msgspec.DecodeError:
            pass  # it is not as OpenAI has it
        else:
            if block.prompt_tokens >= 0 and block.completion_tokens >= 0:
                return block.prompt_tokens, block.completion_tokens
    try:
        found = _read(tail, at)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    prompt = found.get("prompt_tokens", found.get("input_tokens"))
    completion = found.get("completion_tokens", found.get("output_tokens", 0))
    if isinstance(prompt, int) and isinstance(completion, int) and prompt >= 0 and completion >= 0:
        return prompt, completion
    return None


def _read(tail: bytes, at: int) -> object:
    text = tail[at + len(b'"usage"') :].decode(errors="replace").lstrip(" \t\r\n:")
    return _DECODER.raw_decode(text)[0]
