"""Breaks the lines of a text between words while the text arrives, as a terminal does not."""

from __future__ import annotations

from rich.cells import cell_len

from perdure.text.patterns import compiled

_PIECES = compiled(r"\n|[^\S\n]+|\S+")
_FENCE = "```"


class Wrapping:
    r"""Wraps one reply to `width` columns. Keeps the last word until it is complete.

    Lines between code fences, and words that are longer than a line, such as URLs, stay whole, so that they can be
    copied.

    Example:
        >>> wrapping = Wrapping(10)
        >>> wrapping.add("one two th") + wrapping.add("ree four") + wrapping.end()
        'one two\nthree four'
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._gap = self._word = ""
        self._is_code = False

    def add(self, text: str) -> str:
        """The text that can be printed now that `text` has arrived."""
        printed = ""
        for piece in _PIECES.findall(text):
            if not piece.isspace():
                self._word += piece
                continue
            printed += self.end()
            if piece == "\n":
                printed += piece
                self._column, self._gap = 0, ""
            else:
                self._gap += piece
        return printed

    def end(self) -> str:
        """The kept word."""
        word, gap = self._word, self._gap
        if not word:
            return ""
        if not self._column and word.startswith(_FENCE):
            self._is_code = not self._is_code
        self._word = self._gap = ""
        width = cell_len(word)
        start = cell_len((" " * self._column + gap).expandtabs())
        if self._column and not self._is_code and start + width > self._width:
            self._column = width
            return f"\n{word}"
        self._column = start + width
        return gap + word
