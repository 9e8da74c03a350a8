"""Separates thoughts in tags from the text of a streamed reply: `<think>…</think>` at its beginning.

The tags may be split over deltas. An unclosed thought lasts to the end of the reply.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

OPENING = "<think>"
_TAGS = {OPENING: "</think>", "<thinking>": "</thinking>"}


@dataclass(slots=True)
class ThoughtSplitter:
    """Splits deltas into text and thoughts. `thoughts` has all thoughts so far."""

    thoughts: list[str] = field(default_factory=list)
    has_text: bool = False
    """Whether text has begun. A tag after that is text."""
    _closing: str = ""
    _after_thought: bool = False
    _held_back: str = ""

    @classmethod
    def begun(cls, *, thinks: bool) -> Self:
        """A splitter for a new reply. `thinks`: the reply begins in a thought whose opening tag the server omits."""
        return cls(_closing=_TAGS[OPENING] if thinks else "")

    def feed(self, text: str) -> str:
        """The text of a delta that is no thought. The beginning of a possible tag is held back."""
        if self.has_text:
            return text
        text = self._held_back + text
        self._held_back = ""
        return self._inside(text) if self._closing else self._at_the_beginning(text)

    def close(self) -> None:
        """End the thought, if one is open."""
        if self._closing:
            self.thoughts.append(self._held_back)
            self._closing = self._held_back = ""
            self._after_thought = True

    def finish(self) -> str:
        """The text that was held back."""
        rest, self._held_back = self._held_back, ""
        if self._closing:
            self.thoughts.append(rest)
            return ""
        return "" if self._after_thought and not rest.strip() else rest

    def _at_the_beginning(self, text: str) -> str:
        stripped = text.lstrip()
        for opening, closing in _TAGS.items():
            if stripped.startswith(opening):
                self._closing = closing
                return self.feed(stripped.removeprefix(opening))
        if not stripped or any(opening.startswith(stripped) for opening in _TAGS):
            self._held_back = text
            return ""
        self.has_text = True
        return stripped if self._after_thought else text

    def _inside(self, text: str) -> str:
        thought, tag, rest = text.partition(self._closing)
        if tag:
            self.thoughts.append(thought)
            self._closing = ""
            self._after_thought = True
            return self._at_the_beginning(rest)
        kept = next((size for size in range(len(self._closing) - 1, 0, -1) if text.endswith(self._closing[:size])), 0)
        cut_at = len(text) - kept
        self.thoughts.append(text[:cut_at])
        self._held_back = text[cut_at:]
        return ""
