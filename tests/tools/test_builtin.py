"""The built-in tools `calculator` and `clock`."""

from __future__ import annotations

import ast
import math
import threading
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import ToolError
from perdure.tools.builtin import calculator, clock, clock_tool
from perdure.tools.registry import Effect, ToolContext

CONTEXT = ToolContext("ana", UUID(int=1), UUID(int=2), UUID(int=3), "cli", threading.Event())


def calculate(expression: str) -> str:
    """The calculator's result."""
    return calculator.call({"expression": expression}, CONTEXT)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7+5", "89"),
        ("(12 * 7 + 5) / 2", "44.5"),
        ("12 / 4", "3"),
        ("7 // 2", "3"),
        ("-7 % 3", "2"),
        ("2 ** 100", "1267650600228229401496703205376"),
        ("2^10", "1024"),
        ("2 ** -2", "0.25"),
        ("0.1 + 0.2", "0.3"),
        ("12 \N{MULTIPLICATION SIGN} 3 \N{DIVISION SIGN} 4 \N{MINUS SIGN} 1", "8"),
        ("sqrt(16)", "4"),
        ("sqrt(2)", "1.4142135623731"),
        ("2 * pi", "6.28318530717959"),
        ("max(1, min(5, 3)) + abs(-2)", "5"),
        ("round(2.567, 2)", "2.57"),
        ("round(7.6)", "8"),
        ("factorial(20)", "2432902008176640000"),
        ("log(8, 2) + ln(e) + log10(1000)", "7"),
        ("10 ** 999", "1" + "0" * 999),
        ("-+--3", "-3"),
        ("  1_000 + 1 ", "1001"),
        ("round(5, -10**9)", "0"),
        ("round(10**999, -10**15)", "0"),
        ("round(1e300, -10**9)", "0"),
        ("round(5, 10**9)", "5"),
        ("round(2.5, 10**9)", "2.5"),
        ("round(1234, -2)", "1200"),
    ],
)
def test_calculates(expression: str, value: str) -> None:
    """Integer results are exact. Other results have the precision of a float."""
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("9**9**9", "too large"),
        ("9**9**9**9", "too large"),
        ("(-9)**99999999", "too large"),
        ("factorial(10**9)", "too large"),
        ("10**999 * 10**999", "too large"),
        ("1e308 * 10", "too large"),
        ("exp(10**6)", "too large"),
        ("2.0 ** 10**5", "too large"),
        ("lcm(10**400, 3**700, 7**400)", "too large"),
        ("1/0", "divides by zero"),
        ("1 % 0", "divides by zero"),
        ("0 ** -1", "divides by zero"),
        ("sqrt(-1)", "cannot be calculated"),
        ("(-8) ** 0.5", "cannot be calculated"),
        ("factorial(2.5)", "cannot be calculated"),
        ("min()", "cannot be calculated"),
        ("-" * 400 + "1", "nested more than"),
        ("(" * 400, "not an arithmetic expression"),
        ("", "not an arithmetic expression"),
        ("1 +", "not an arithmetic expression"),
        ("1; 2", "not an arithmetic expression"),
        ("9" * 5_000, "not an arithmetic expression"),
        ("x", "does not know 'x'"),
        ("__import__('os')", "does not know '__import__'"),
        ("open('/etc/passwd')", "does not know 'open'"),
        ("pi.__class__", "numbers, operators and functions only"),
        ("(lambda: 1)()", "numbers, operators and functions only"),
        ("[1] * 10", "numbers, operators and functions only"),
        ("'a' * 3", "numbers, operators and functions only"),
        ("True + 1", "numbers, operators and functions only"),
        ("1j", "numbers, operators and functions only"),
        ("what is 1+1", "numbers, operators and functions only"),
        ("1 << 10**9", "numbers, operators and functions only"),
        ("round(1, ndigits=2)", "does not know 'round'"),
        ("~" * 400 + "1", "numbers, operators and functions only"),
    ],
)
def test_refuses_anything_but_bounded_arithmetic(expression: str, reason: str) -> None:
    """The calculator evaluates only arithmetic within limits, because a model's arguments are untrusted."""
    with pytest.raises(ToolError) as caught:
        calculate(expression)
    assert reason in caught.value.message


@given(st.integers(-(10**30), 10**30), st.sampled_from("+-*/"), st.integers(-(10**30), 10**30))
def test_agrees_with_exact_arithmetic(left: int, operator: str, right: int) -> None:
    """Integer results are exact. Other results differ from the exact value only by rounding."""
    if operator == "/" and right == 0:
        return
    exact = {
        "+": lambda: Fraction(left + right),
        "-": lambda: Fraction(left - right),
        "*": lambda: Fraction(left * right),
        "/": lambda: Fraction(left, right),
    }[operator]()
    shown = Fraction(calculate(f"({left}) {operator} ({right})"))
    assert shown == exact if exact.denominator == 1 else math.isclose(shown, exact, rel_tol=1e-14)


@given(st.text("0123456789.+-*/%()e ,_", max_size=40))
def test_always_answers(expression: str) -> None:
    """Any string gives a finite number or a `ToolError`."""
    try:
        answer = calculate(expression)
    except ToolError as error:
        answer = error.message
    else:
        assert math.isfinite(ast.literal_eval(answer))
    assert answer


def test_survives_syntax_trees_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython may confuse the syntax trees of two threads: the expression is parsed again, a few times."""
    parse, failures = ast.parse, iter(range(6))

    def confused(*args: Any, **options: Any) -> ast.AST:
        if next(failures) in {0, 1}:
            raise SystemError("AST constructor recursion depth mismatch (before=42, after=38)")
        tree: ast.AST = parse(*args, **options)
        return tree

    monkeypatch.setattr(ast, "parse", confused)
    assert calculate("6 * 7") == "42"
    monkeypatch.setattr(ast, "parse", Mock(side_effect=SystemError("it stays so")))
    with pytest.raises(ToolError, match="it stays so"):
        calculate("6 * 7")


def test_is_bounded_in_length() -> None:
    """An expression of more than 500 characters is refused."""
    with pytest.raises(ToolError, match="at most 500 characters"):
        calculator.parse('{"expression": "' + "1+" * 300 + '1"}')


class _Stopped:
    def now(self) -> datetime:
        return datetime(2026, 7, 1, 22, 30, tzinfo=UTC)

    def monotonic(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("zone", "expected"),
    [
        ("UTC", "2026-07-01T22:30:00+00:00 (Wednesday, UTC)"),
        ("Asia/Seoul", "2026-07-02T07:30:00+09:00 (Thursday, Asia/Seoul)"),
        (" Europe/Paris ", "2026-07-02T00:30:00+02:00 (Thursday, Europe/Paris)"),
    ],
)
def test_reads_the_given_clock(zone: str, expected: str) -> None:
    """The tool returns the given clock's time and the weekday, which models often compute wrongly."""
    assert clock_tool(_Stopped()).call({"zone": zone}, CONTEXT) == expected


@pytest.mark.parametrize("zone", ["", "Paris", "Europe", "../../etc/passwd", "/etc/localtime", "a\x00b", "x" * 10_000])
def test_refuses_an_invalid_time_zone(zone: str) -> None:
    """An invalid time zone is refused, because the zone's name becomes part of a file path."""
    with pytest.raises(ToolError, match="is not a time zone"):
        clock.call({"zone": zone}, CONTEXT)


def test_both_tools_are_pure() -> None:
    """`calculator` and `clock` are pure, so that the engine can repeat a call after a crash."""
    assert calculator.effect is Effect.PURE
    assert clock.effect is Effect.PURE
