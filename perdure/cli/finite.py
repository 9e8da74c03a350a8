"""A check of options in seconds: `float` also reads `nan` and `inf`, which no range refuses."""

from __future__ import annotations

import math

import typer


def finite(seconds: float | None) -> float | None:
    """`seconds`, as the callback of an option.

    Raises:
        typer.BadParameter: it is no finite number.
    """
    if seconds is not None and not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is not a finite number of seconds.")
    return seconds
