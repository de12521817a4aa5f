from __future__ import annotations

from llmgw.router.errors import again_in


def test_nobody_is_told_to_come_back_too_soon_nor_all_at_once() -> None:
    for seconds, least, most in (
        (0.0, 1, 2),
        (0.2, 1, 2),
        (19, 19, 20),
        (30.5, 31, 34),
        (60, 60, 65),
        (86400, 86400, 86405),
    ):
        told = {again_in(seconds) for _ in range(200)}
        assert (min(told), max(told)) == (least, most)
