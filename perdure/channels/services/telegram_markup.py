"""Markdown as Telegram shows it: a subset of HTML, made from markdown-it's tokens.

Telegram has no headings, lists and tables: a heading becomes bold, the items of a list get their marks, and a table
becomes text of a fixed width. Text that only looks like Markdown stays as it is: HTML, `snake_case` and `2*3*4`.

The text may be a part of a longer one. Indented text may therefore belong to a list that began in an earlier part: it
is no code. A definition such as `[1]: https://a.example` stays text, because other parts may refer to it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.rules_inline.emphasis import tokenize as emphasis
from markdown_it.token import Token

from perdure.text.patterns import compiled

_TAGS = {"strong": "b", "em": "i", "s": "s", "blockquote": "blockquote", "heading": "b"}
_SCHEMES = ("https://", "http://", "mailto:", "tg://")
_TAG = compiled(r"</?(?:b|i|s|a|code|pre|blockquote)(?: [^>]*)?>")
_LANGUAGE = compiled(r"[A-Za-z0-9_+#-]{1,40}")


def render(text: str) -> str:
    """Markdown as Telegram's HTML."""
    made = _Made()
    for token in _parser().parse(_dedented(text)):
        made.block(token)
    return made.text.strip("\n")


def visible(text: str) -> str:
    """What Telegram shows of `render`'s HTML, whose length it limits."""
    return html.unescape(_TAG.sub(lambda _: "", text))


def _dedented(text: str) -> str:
    """`text` without the indentation that its first lines have in common. The items of a list are nested in none."""
    lines = text.split("\n")
    indents = [len(line) - len(line.lstrip(" ")) for line in lines]
    first = list(takewhile(lambda at: indents[at] or not lines[at], range(len(lines))))
    common = min((indents[at] for at in first if lines[at].strip()), default=0)
    return "\n".join([*(lines[at][common:] for at in first), *lines[len(first) :]])


@cache
def _parser() -> MarkdownIt:
    made = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable(["html_block", "image"])
    made.disable(["html_inline", "entity", "code", "reference"])
    made.inline.ruler.at("emphasis", _emphasis)
    return made


def _emphasis(state: StateInline, silent: bool) -> bool:  # noqa: FBT001 (markdown-it's signature)
    """Emphasis, but for `2*3*4`, `x**2 + y**2` and `__init__`.

    A single `*` between letters or digits and two underscores are text. More asterisks between letters or digits end
    emphasis, as in `**API**s`, and begin none.
    """
    at = state.pos
    before, marker, after = state.src[at - 1 : at], state.src[at], state.src[at + 1 : at + 2]
    if silent or marker not in "*_" or (marker == "_" and "_" in {before, after}):
        return False  # before the scan: it reads the whole run of a character
    length = state.scanDelims(at, True).length  # noqa: FBT003 (markdown-it's signature)
    after = state.src[at + length : at + length + 1]
    is_in_word = marker == "*" and (before + after).isascii() and before.isalnum() and after.isalnum()
    if is_in_word and length == 1:
        return False
    known = len(state.delimiters)
    found = emphasis(state, silent)
    if is_in_word:
        for delimiter in state.delimiters[known:]:
            delimiter.open = False
    return found


@dataclass
class _Made:
    """The HTML so far. `lists` has, for each open list, the number of its next item, or `None` for bullets."""

    text: str = ""
    lists: list[int | None] = field(default_factory=list)
    rows: list[list[str]] | None = None

    def block(self, token: Token) -> None:  # noqa: C901 (each kind of block)
        kind, opens, closes = token.type, token.nesting > 0, token.nesting < 0
        name = kind.rsplit("_", 1)[0] if token.nesting else kind
        match name:
            case "inline":
                inline = "".join(_inline(token.children or ()))
                if self.rows is None:
                    self.text += inline
                else:
                    self.rows[-1].append(visible(inline))
            case "bullet_list" | "ordered_list":
                self._list(token, opens=opens)
            case "list_item" if opens:
                self._item()
            case "paragraph" | "heading" | "blockquote":
                self._tag(_TAGS.get(name), opens=opens)
                if closes:
                    self.text += "\n" if self.lists else "\n\n"
            case "fence":
                language = token.info.split(maxsplit=1)[0] if token.info.strip() else ""
                code = _escape(token.content.rstrip("\n").removesuffix(token.markup or "\n"))  # closed in its last line
                named = f'<code class="language-{language}">{code}</code>' if _LANGUAGE.fullmatch(language) else code
                self.text += f"<pre>{named}</pre>\n\n" if code else ""
            case "hr":
                self.text += "———\n\n"
            case "table":
                self._table(opens=opens)
            case "tr" if opens and self.rows is not None:
                self.rows.append([])
            case _:
                pass

    def _tag(self, name: str | None, *, opens: bool) -> None:
        if name is not None:
            self.text = self.text if opens else self.text.rstrip("\n")
            self.text += f"<{name}>" if opens else f"</{name}>"

    def _list(self, token: Token, *, opens: bool) -> None:
        if opens:
            self.text = self.text.rstrip("\n") + ("\n" if self.lists else "\n\n" if self.text.strip("\n") else "")
            self.lists.append(int(token.attrs.get("start", 1)) if token.type == "ordered_list_open" else None)
        else:
            self.lists.pop()
            self.text = self.text.rstrip("\n") + ("\n" if self.lists else "\n\n")

    def _item(self) -> None:
        number = self.lists[-1]
        self.text += "  " * (len(self.lists) - 1) + ("• " if number is None else f"{number}. ")
        self.lists[-1] = None if number is None else number + 1

    def _table(self, *, opens: bool) -> None:
        if opens:
            self.rows = []
            return
        rows, self.rows = self.rows or [], None
        widths = [max(len(row[at]) for row in rows if at < len(row)) for at in range(max(map(len, rows), default=0))]
        padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=False)] for row in rows]
        lines = "\n".join("  ".join(row).rstrip() for row in padded)
        self.text += f"<pre>{_escape(lines)}</pre>\n\n"


def _escape(text: str) -> str:
    return html.escape(text, quote=False)


def _inline(tokens: Sequence[Token]) -> Iterable[str]:  # noqa: C901 (each kind of token)
    links: list[bool] = []
    for token in tokens:
        match token.type:
            case "text":
                yield _escape(token.content)
            case "code_inline":
                yield f"<code>{_escape(token.content)}</code>"
            case "softbreak" | "hardbreak":
                yield "\n"
            case "strong_open" | "em_open" | "s_open":
                yield f"<{_TAGS[token.type.removesuffix('_open')]}>"
            case "strong_close" | "em_close" | "s_close":
                yield f"</{_TAGS[token.type.removesuffix('_close')]}>"
            case "link_open":
                url = str(token.attrs.get("href", ""))
                links.append(url.startswith(_SCHEMES))
                yield f'<a href="{html.escape(url)}">' if links[-1] else "["
            case "link_close":
                yield "</a>" if links.pop() else "]"
            case _:
                yield _escape(token.content)
