"""Quotes in a person's message the messages that the person replies to or forwards.

Other people wrote them, and possibly for the agent to read. Each is therefore a quotation (`perdure.text.quoting`):
data to the model, and no text of the person to the consolidation of memories. The quotations follow the person's own
text, so that what is cut from a long message is not the person's. A quotation has the name of its author in its first
line, because a person chooses the own name. Only the title, which is not quoted, says that the agent is the author.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.channels.services.protocol import SOMEONE, Quoted
from perdure.text.quoting import MESSAGE, Quoter, quoted
from perdure.text.untrusted import cut, first_line, storable

MOST_CHARS = 2_000
"""The most characters of the messages that one message quotes, together."""

MOST_OWN_CHARS = 500
"""The most characters of a quoted message of the agent. The agent's messages are in the conversation already."""

_LEAST_CHARS = 100
"""A quotation with room for fewer characters is left out."""

_MOST_NAME_CHARS = 80
_REPLIED, _FORWARDED = "The message replies to this one", "The forwarded message"


def with_quotations(text: str, messages: Sequence[Quoted], key: bytes, most_chars: int) -> str:
    """The text of a message, and the messages that it quotes. Longer than `most_chars` only if `text` is.

    `key` is the key of the quotations' codes. The result is the same each time.
    """
    quoter, left = Quoter(key), MOST_CHARS
    for each in messages:
        title = _FORWARDED if each.is_forward else _REPLIED
        if each.author is None:
            title, head = f"{title}, which you wrote", []
        else:
            head = [f"{first_line(each.author, _MOST_NAME_CHARS) or SOMEONE} wrote:"]
        frame = len(quoted(MESSAGE, title, [*head, "."])) + 1
        room = min(left, most_chars - len(text) - frame, MOST_OWN_CHARS if each.author is None else MOST_CHARS)
        if room < _LEAST_CHARS or not each.text.strip():
            continue
        shown = cut(storable(each.text.strip()), room)
        left -= len(shown)
        text = "\n\n".join([*([text] if text else []), quoter.quote(MESSAGE, title, [*head, shown])])
    return text
