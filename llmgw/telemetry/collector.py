"""Python's garbage collector in a daemon that lives long and must not pause."""

from __future__ import annotations

import gc


def spare_what_is_loaded() -> None:
    """Call it once everything is imported: what is there by now stays for ever and is not looked at again and again.

    New objects are looked at less often too; a full collection holds everybody up for as long as there are objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
