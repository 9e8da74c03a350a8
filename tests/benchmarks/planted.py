"""The worker of a planted system: it begins each turn again from its start, with new keys."""

from __future__ import annotations

from uuid import uuid4

from benchmarks.crashes import script


def main() -> None:
    """Answer requests until the process is killed."""
    print(script.READY)  # noqa: T201 (the harness reads it)
    while turn := script.next_turn():
        key = uuid4().hex
        assert script.ask(turn) is None
        text = script.ask(turn, script.order(turn, key))
        assert text is not None
        script.reply(turn, text, key)
        script.answered(turn)


if __name__ == "__main__":
    main()
