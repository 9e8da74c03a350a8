"""Garbage collection while a command starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred() -> Iterator[None]:
    """Disable garbage collection inside the block, and exempt the block's objects from all later collections.

    During imports, garbage collection takes a tenth of the command's CPU time and frees little memory.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
