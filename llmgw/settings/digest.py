"""A short name for exactly one profile of one model."""

from __future__ import annotations

import hashlib
import json

from llmgw.settings.catalog import Profile
from llmgw.settings.convert import strict_converter

_CONVERTER = strict_converter()


def profile_digest(model: str, profile: Profile) -> str:
    """Sixteen hex digits that change whenever anything about the profile does."""
    text = json.dumps([model, _CONVERTER.unstructure(profile)], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
