"""Where a prompt's system messages stand on a wire.

The first system messages of a prompt change least, and are the provider's system prompt. A later one is a note: what
the engine adds to the message that follows it. In front, a note would end the prefix that providers cache, so it stays
where it is: a message of its own, or, for a server that accepts a system message at the beginning only, the beginning
of the user's message that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from perdure.models.protocol import Message, Role


@dataclass(frozen=True, slots=True)
class Placed:
    """A prompt whose system prompt is apart from its messages.

    Attributes:
        system: The texts of the system prompt, the one that changes least first.
        messages: The other messages. Notes are system messages, unless they are part of users' messages.
        lasting: How many of `messages` stand before the first note, and so are the same in the next turn's prompt.
    """

    system: list[str]
    messages: list[Message]
    lasting: int


def placed(messages: Sequence[Message], *, within: bool = False) -> Placed:
    r"""The system prompt and the messages of a prompt. `within`: each note is part of the user's message behind it.

    >>> said = [Message(Role.SYSTEM, "You help."), Message(Role.USER, "hi"), Message(Role.ASSISTANT, "Hello.")]
    >>> asked = [*said, Message(Role.SYSTEM, "It is noon."), Message(Role.USER, "What time is it?")]
    >>> [each.content for each in placed(asked).messages]
    ['hi', 'Hello.', 'It is noon.', 'What time is it?']
    >>> prompt = placed(asked, within=True)
    >>> prompt.system, prompt.lasting, prompt.messages[-1].content
    (['You help.'], 2, 'It is noon.\n\nWhat time is it?')
    """
    first = next((at for at, each in enumerate(messages) if each.role is not Role.SYSTEM), len(messages))
    system = [each.content for each in messages[:first] if each.content.strip()]
    rest = list(messages[first:])
    lasting = next((at for at, each in enumerate(rest) if each.role is Role.SYSTEM), 0)
    return Placed(system, _within(rest) if within else rest, lasting)


def _within(messages: Sequence[Message]) -> list[Message]:
    """The messages, with each note as the beginning of the user's message that follows it, or in its place."""
    found, note = list[Message](), ""
    for each in messages:
        if each.role is Role.SYSTEM:
            note = f"{note}\n\n{each.content}" if note else each.content
            continue
        if note and each.role is Role.USER:
            found.append(_after(note, each))
        elif note:
            found += [Message(Role.USER, note), each]
        else:
            found.append(each)
        note = ""
    return [*found, Message(Role.USER, note)] if note else found


def _after(note: str, message: Message) -> Message:
    """The user's message with `note` before its text."""
    beginning = f"{note}\n\n"
    files = [replace(each, start=each.start + len(beginning), end=each.end + len(beginning)) for each in message.files]
    return replace(message, content=beginning + message.content, files=tuple(files))
