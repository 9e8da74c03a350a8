"""Thoughts that a model writes in tags before its answer, as models do whose server does not separate them."""

from __future__ import annotations

from enum import Enum, auto

_OPENING_TAGS = ("<think>", "<thinking>", "<thought>")
_LONGEST_BEGINNING = 1_000
"""Maximum characters of white space before a tag."""


class _Place(Enum):
    START = auto()
    THOUGHT = auto()
    TEXT = auto()


class ThoughtTags:
    """Separates thoughts in tags at the beginning of a text, which arrives in pieces, from the rest of the text.

    Tags after the beginning are text, because a model may write about them.
    """

    def __init__(self, *, thinks_first: bool = False) -> None:
        """`thinks_first`: the text begins with thoughts, even without an opening tag."""
        self._place = _Place.START
        self._held = ""
        self._closing = ""
        self._thinks_first = thinks_first
        self.is_unopened = False
        """Whether the thoughts so far have neither an opening nor a closing tag."""

    def split(self, piece: str) -> tuple[str, str]:
        """The thoughts and the text that `piece` completes. A piece of a tag is held back."""
        if self._place is _Place.TEXT:
            return "", piece
        self._held += piece
        thoughts = ""
        while self._held:
            if self._place is _Place.THOUGHT:
                thought, closed, rest = self._held.partition(self._closing)
                if not closed:
                    kept = _length_of_beginning(self._closing, thought)
                    self._held = thought[len(thought) - kept :]
                    return thoughts + thought[: len(thought) - kept], ""
                thoughts += thought
                self._held, self._place, self._thinks_first, self.is_unopened = rest, _Place.START, False, False
                continue
            beginning = self._held.lstrip()
            opening = next((tag for tag in _OPENING_TAGS if beginning.startswith(tag)), None)
            may_open = len(self._held) < _LONGEST_BEGINNING and any(tag.startswith(beginning) for tag in _OPENING_TAGS)
            if opening is None and may_open:
                break
            if opening is None and not self._thinks_first:
                return thoughts, self._end(beginning)
            self.is_unopened = opening is None
            self._place, self._closing = _Place.THOUGHT, f"</{(opening or '<think>')[1:]}"
            self._held = beginning[len(opening or "") :]
        return thoughts, ""

    def rest(self) -> tuple[str, str]:
        """The thoughts and the text that were held back at the end of the reply."""
        if self._place is _Place.THOUGHT:
            return self._held, ""
        return "", self._end(self._held.lstrip())

    def _end(self, beginning: str) -> str:
        # White space before the text belongs to the text, but white space after thoughts separates the two.
        text = beginning if self._closing else self._held
        self._place, self._held = _Place.TEXT, ""
        return text


def _length_of_beginning(tag: str, text: str) -> int:
    """How many of the last characters of `text` are the beginning of `tag`."""
    longest = min(len(tag) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
