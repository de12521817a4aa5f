"""``pytest --hypothesis-profile=long`` looks harder: twenty times as many examples of everything."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How fast inputs are made says how busy the machine is, not whether the code is right.
_PATIENT = [HealthCheck.too_slow]

settings.register_profile("usual", deadline=None, suppress_health_check=_PATIENT)
settings.register_profile("long", max_examples=2000, deadline=None, suppress_health_check=_PATIENT)
settings.load_profile("usual")
