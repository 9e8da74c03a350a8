"""The arguments of a tool are parsed strictly, as one JSON object."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.text.untrusted import MAX_DEPTH, load_object

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=10)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=4)


@pytest.mark.long
@given(OBJECTS, st.booleans())
def test_every_valid_object_is_accepted_unchanged(value: dict[str, Any], ascii_only: bool) -> None:
    """Every valid object is accepted unchanged, whether or not non-ASCII characters are escaped."""
    assert load_object(json.dumps(value, ensure_ascii=ascii_only)) == value


@given(st.text())
def test_any_text_is_an_object_or_refused_with_a_reason(text: str) -> None:
    """Any text gives an object or a `ValueError` with a reason, never another error."""
    try:
        value = load_object(text)
    except ValueError as error:
        reason = str(error)
    else:
        reason = "none"
        assert isinstance(value, dict)
    assert reason.encode()


@given(OBJECTS, TEXT, VALUES, VALUES)
def test_a_key_given_twice_is_refused(value: dict[str, Any], key: str, one: Any, other: Any) -> None:
    """A repeated key is refused, because the intended value is unknown."""
    pairs = [*value.items(), (key, one), (key, other)]
    text = "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in pairs) + "}"
    with pytest.raises(ValueError, match="given twice"):
        load_object(text)


@given(VALUES.filter(lambda value: not isinstance(value, dict)))
def test_only_objects_are_arguments(value: Any) -> None:
    """JSON that is not an object is refused, because every argument has a name."""
    with pytest.raises(ValueError, match="expected a JSON object"):
        load_object(json.dumps(value))


@given(st.integers(1, 3 * MAX_DEPTH))
def test_nesting_has_a_bound(depth: int) -> None:
    """Deeply nested objects are refused, because recursive code would fail on them."""
    text = '{"a": ' * depth + "1" + "}" * depth
    if depth <= MAX_DEPTH - 1:
        assert load_object(text)
    else:
        with pytest.raises(ValueError, match="levels deep"):
            load_object(text)
