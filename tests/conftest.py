"""``pytest --hypothesis-profile=long`` looks harder: twenty times as many examples of everything."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("long", max_examples=2000, deadline=None)
