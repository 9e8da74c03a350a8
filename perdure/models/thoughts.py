"""Thoughts that a model writes in tags, as models do whose server does not separate them.

    <think>…</think>, <thinking>…</thinking>, <thought>…</thought>, <seed:think>…</seed:think>,
    [THINK]…[/THINK] and ◁think▷…◁/think▷, in any case of letters, and nested

An opening tag begins thoughts at the beginning of a text, after other thoughts, and at the beginning of a line that is
not the first one of a code block. Elsewhere it is text: a model may write about tags.

Some thoughts are in doubt until a closing tag follows: those without an opening tag, those after text, and those after
the end of nested thoughts. If none follows and the reply ended properly, they are text.
"""

from __future__ import annotations

from enum import Enum, auto

from perdure.text.patterns import compiled

_TAG = compiled(r"</?(seed:)?(think|thinking|thought)>|\[/?think\]|◁/?think▷", ignore_case=True)
_OPENERS, _BRACKETS = "<[◁", "</>[]◁▷"
_NAMES = ("think", "thinking", "thought")
_TAGS = [f"<{mark}{name}>" for name in _NAMES for mark in ("", "/", "seed:", "/seed:")]
_TAGS += ["[think]", "[/think]", "◁think▷", "◁/think▷"]
_BEGINNINGS = frozenset(tag[:length] for tag in _TAGS for length in range(1, len(tag)))
_LONGEST_BEGINNING = max(map(len, _BEGINNINGS))
_LONGEST_SPACE = 1_000
"""Maximum characters of white space before a tag at the beginning of a text."""
_LOOKED_BACK = 80
"""How many of the characters before a tag decide whether it begins a line."""
_FENCES = ("```", "~~~")


class _Place(Enum):
    START = auto()
    THOUGHT = auto()
    TEXT = auto()


class ThoughtTags:
    """Separates thoughts in tags from the rest of a text, which arrives in pieces."""

    def __init__(self, *, thinks_first: bool = False) -> None:
        """`thinks_first`: the text begins with thoughts, even without an opening tag."""
        self._place = _Place.START
        self._thinks_first = thinks_first
        self._after_thoughts = False
        self._held = ""
        self._space = ""
        self._before = ""
        self._name = ""
        self._depth = 0
        self._opening = ""
        self._doubtful: list[str] | None = None
        self._thoughts: list[str] = []
        self._text: list[str] = []

    def split(self, piece: str) -> tuple[str, str]:
        """The thoughts and the text that `piece` completes. The beginning of a possible tag is held back."""
        if self._place is _Place.TEXT and not self._held and "<" not in piece and "[" not in piece and "◁" not in piece:
            self._before = (self._before + piece)[-_LOOKED_BACK:]
            return "", piece
        whole = self._held + piece
        at = 0
        for found in _TAG.finditer(whole):
            self._add(whole[at : found.start()])
            self._take(found[0])
            at = found.end()
        rest = whole[at:]
        start = max(map(rest.rfind, _OPENERS))
        tail = rest[start:] if start >= 0 and len(rest) - start <= _LONGEST_BEGINNING else ""
        self._held = tail if tail.lower() in _BEGINNINGS else ""
        self._add(rest[: len(rest) - len(self._held)])
        return self._completed()

    def close(self) -> tuple[str, str]:
        """End the thoughts, as a closing tag does. Returns what `split` returns."""
        if self._place is not _Place.THOUGHT:
            return "", ""
        self._depth = 1
        return self.split(f"</{self._name}>")

    def finish(self, *, is_proper: bool) -> tuple[str, str, int]:
        """The thoughts and the text that were held back at the end of the reply.

        If the reply ended properly (`is_proper`), thoughts in doubt are text. The third value is the number of
        characters at the end of all thoughts that are text.
        """
        self._add(self._held)
        if not self._after_thoughts and self._space:
            self._text.append(self._space)
        thoughts, text = self._completed()
        if self._doubtful is None or not is_proper:
            return thoughts, text, 0
        doubtful = "".join(self._doubtful)
        return thoughts, text + self._opening + doubtful.lstrip(), len(doubtful)

    def _completed(self) -> tuple[str, str]:
        completed = "".join(self._thoughts), "".join(self._text)
        self._thoughts, self._text = [], []
        return completed

    def _add(self, piece: str) -> None:
        """Add a piece without a tag."""
        if self._place is _Place.START:
            # White space before the text belongs to the text, but white space after thoughts separates the two.
            self._space += piece
            if len(self._space) < _LONGEST_SPACE and not self._space.strip():
                return
            piece, self._space = self._space.lstrip() if self._after_thoughts else self._space, ""
            if self._thinks_first:
                self._begin("think", in_doubt=True)
                piece = piece.lstrip()
        if self._place is _Place.THOUGHT:
            self._thoughts.append(piece)
            if self._doubtful is not None:
                self._doubtful.append(piece)
        elif piece:
            self._place = _Place.TEXT
            self._text.append(piece)
            self._before = (self._before + piece)[-_LOOKED_BACK:]

    def _take(self, tag: str) -> None:
        name, opens = tag.strip(_BRACKETS).lower(), tag[1] != "/"
        if self._place is _Place.THOUGHT and name == self._name:
            self._depth += 1 if opens else -1
            if self._depth == 0:
                self._place, self._thinks_first, self._after_thoughts, self._doubtful = _Place.START, False, True, None
            elif not opens:
                self._opening, self._doubtful = "", []
        elif self._place is _Place.START and (opens or self._thinks_first):
            self._begin(name if opens else "think", in_doubt=not opens)
            if not opens:
                self._take(tag)
        elif self._place is _Place.TEXT and opens and self._begins_a_line():
            self._begin(name, in_doubt=True, opening=tag)
        elif self._place is not _Place.START or not self._after_thoughts:  # a closing tag too many is left out
            self._add(tag)

    def _begin(self, name: str, *, in_doubt: bool, opening: str = "") -> None:
        self._place, self._name, self._depth, self._space = _Place.THOUGHT, name, 1, ""
        self._opening, self._doubtful = opening, [] if in_doubt else None

    def _begins_a_line(self) -> bool:
        before, newline, line = self._before.rpartition("\n")
        is_first_of_code = before.rpartition("\n")[2].strip().startswith(_FENCES)
        return bool(newline) and not line.strip() and not is_first_of_code
