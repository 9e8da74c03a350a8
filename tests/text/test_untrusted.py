"""Untrusted text, as people read it."""

from __future__ import annotations

import json

from perdure.text.untrusted import shown_json


def test_arguments_are_shown_in_their_order() -> None:
    """What a person approves reads as it is, also if it names directions of text, and is still the same JSON."""
    given = {"account": "\u202e54321\u2066", "cents": "\u200f10 000\u061c5\u200e", "to": "שלום"}
    shown = shown_json(given)
    assert shown == r'{"account": "\u202e54321\u2066", "cents": "\u200f10 000\u061c5\u200e", "to": "שלום"}'
    assert json.loads(shown) == given
