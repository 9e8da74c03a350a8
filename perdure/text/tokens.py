"""Token estimates: a conservative number from the size of the text, without a vendor's tokenizer."""

from __future__ import annotations

BYTES_PER_TOKEN = 3
_CUT = " […]"


def estimate_tokens(text: str) -> int:
    """A conservative estimate of the tokens of `text`: one per three bytes of UTF-8, rounded up."""
    return -(-size(text) // BYTES_PER_TOKEN)


def cut_to(text: str, budget: int) -> str:
    """Cut `text` to `budget` tokens if it is longer. A mark at the end shows that text was removed."""
    return text if estimate_tokens(text) <= budget else beginning(text, budget * BYTES_PER_TOKEN)


def beginning(text: str, room: int) -> str:
    """The beginning of `text` that fits `room` bytes together with the cut mark; empty if the mark does not fit."""
    room -= size(_CUT)
    return _encoded(text)[:room].decode("utf-8", "ignore") + _CUT if room > 0 else ""


def size(text: str) -> int:
    return len(_encoded(text))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # an agent's instructions may contain lone surrogates
