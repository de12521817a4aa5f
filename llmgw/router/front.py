"""What a worker does for its clients besides asking engines: scrapes, lines for browsers, requests told to a log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from attrs import define

from llmgw.router.cors import CorsRules
from llmgw.router.telling import Teller


@define
class Front:
    """``scrape`` gives the exposition of all workers; ``cors`` and ``teller`` are ``None`` where nobody wants them."""

    scrape: Callable[[], Awaitable[bytes]]
    cors: CorsRules | None = None
    teller: Teller | None = None
