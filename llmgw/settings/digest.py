"""A short name for exactly one profile of one model."""

from __future__ import annotations

import hashlib
import json

import attrs

from llmgw.settings.catalog import Profile
from llmgw.settings.convert import strict_converter

_CONVERTER = strict_converter()

_LATER = ("dp", "expert_parallel", "task", "lora", "parameters", "concurrency")
"""Fields that came later: a profile that does not use them keeps the digest that it had before."""


def profile_digest(model: str, profile: Profile) -> str:
    """Sixteen hex digits that change whenever anything about the profile does."""
    fields = _CONVERTER.unstructure(profile)
    for name in _LATER:
        if getattr(profile, name) == getattr(attrs.fields(Profile), name).default:
            del fields[name]
    text = json.dumps([model, fields], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
