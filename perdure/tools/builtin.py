"""The built-in tools `calculator` and `clock`. The calculator's work is bounded for any expression."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, assert_never
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field

from perdure.clock import Clock, SystemClock
from perdure.errors import ToolError
from perdure.tools.registry import Effect, Tool, tool

Number = int | float

MAX_DIGITS = 1_000
"""The most decimal digits of a whole number. The limit also applies to intermediate results."""

MAX_DEPTH = 50
"""The most levels of nesting in an expression."""

_ATTEMPTS = 5

_MAX_BITS = math.ceil(MAX_DIGITS * math.log2(10))
_AS_TYPED = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-", "^": "**"})
_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}


@tool(effect=Effect.PURE)
def calculator(expression: Annotated[str, Field(max_length=500)]) -> str:
    """Calculate an arithmetic expression and return its value. Whole numbers are exact.

    Knows + - * / // % ** and parentheses; abs, round, floor, ceil, sqrt, exp, ln, log,
    log2, log10, sin, cos, tan, asin, acos, atan, degrees, radians, hypot, min, max, gcd,
    lcm, factorial; and pi, e, tau.

    Args:
        expression: The expression, such as (12 * 7 + 5) / 2 or sqrt(2) * pi.
    """
    try:
        tree = _parsed(expression.translate(_AS_TYPED).strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"{expression!r} is not an arithmetic expression, such as (12 * 7 + 5) / 2") from None
    try:
        value = _value(tree, MAX_DEPTH)
    except ZeroDivisionError:
        raise ToolError("That divides by zero.") from None
    except OverflowError:
        raise ToolError("The result is too large.") from None
    except (ValueError, TypeError) as error:
        raise ToolError(f"That cannot be calculated: {error}.") from None
    return str(value) if isinstance(value, int) else format(value, ".15g")


def _parsed(expression: str) -> ast.expr:
    # CPython 3.11 to 3.13 count the depth of an interpreter's syntax trees in one variable. Another thread that makes a
    # tree at the same time, as each formatted traceback does, can change it; then `ast.parse` raises SystemError.
    for _ in range(_ATTEMPTS - 1):
        with suppress(SystemError):
            return ast.parse(expression, mode="eval").body
    return ast.parse(expression, mode="eval").body


def _value(node: ast.expr, depth: int) -> Number:
    if depth == 0:
        raise ToolError(f"The expression is nested more than {MAX_DEPTH} levels deep.")
    of = partial(_value, depth=depth - 1)
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _SIGNS:
            return _SIGNS[type(op)](of(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](of(left), of(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*[of(each) for each in args]))
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            raise ToolError(f"The calculator does not know {name!r}.")
        case _:
            raise ToolError("The calculator knows numbers, operators and functions only.")


def _bounded(value: Number) -> Number:
    match value:
        case int():
            if value.bit_length() > _MAX_BITS:
                raise OverflowError
        case float():
            if not math.isfinite(value):
                raise OverflowError
        case _:
            assert_never(value)
    return value


def _divide(left: Number, right: Number) -> Number:
    """Divide; returns an int if there is no remainder, so that large whole numbers stay exact."""
    if isinstance(left, int) and isinstance(right, int) and left % right == 0:
        return left // right
    return left / right


def _power(base: Number, exponent: Number) -> Number:
    # Checks the size of the result before the computation: 9 ** 9 ** 9 would not end.
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1 and exponent > 0:
        if (abs(base).bit_length() - 1) * exponent > _MAX_BITS:
            raise OverflowError
        return int(base**exponent)
    if base < 0 and not float(exponent).is_integer():
        raise ValueError("a negative number has no real root of that kind")
    return float(base) ** float(exponent) if exponent < 0 or isinstance(exponent, float) else base**exponent


def _sqrt(value: Number) -> Number:
    if isinstance(value, int) and value >= 0 and (root := math.isqrt(value)) ** 2 == value:
        return root
    return math.sqrt(value)


def _round(value: Number, digits: Number = 0) -> Number:
    places = operator.index(digits)  # type: ignore[arg-type]  # a float raises a TypeError, which the model receives
    if places < -MAX_DIGITS:
        return 0  # no value has that many digits, and Python would compute 10 ** -places
    return round(value, places) if places > 0 else int(round(value, places))


def _factorial(value: Number) -> int:
    if value > MAX_DIGITS:
        raise OverflowError
    return math.factorial(operator.index(value))  # type: ignore[arg-type]  # as in `_round`


_SIGNS: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}

_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}

_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs,
    "round": _round,
    "floor": math.floor,
    "ceil": math.ceil,
    "sqrt": _sqrt,
    "exp": math.exp,
    "ln": math.log,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
    "degrees": math.degrees,
    "radians": math.radians,
    "hypot": math.hypot,
    "min": min,
    "max": max,
    "gcd": math.gcd,
    "lcm": math.lcm,
    "factorial": _factorial,
}


def clock_tool(source: Clock) -> Tool:
    """The tool `clock`, which reads the time from `source`."""

    @tool(effect=Effect.PURE, name="clock")
    def tell(zone: str = "UTC") -> str:
        """Tell the current date and time in a time zone.

        Args:
            zone: A name of the IANA time zone database, such as Europe/Paris or Asia/Seoul.
        """
        try:
            there = ZoneInfo(zone.strip())
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ToolError(
                f"{zone!r} is not a time zone. Expected a name of the IANA database, such as Europe/Paris."
            ) from None
        moment = source.now().astimezone(there)
        return f"{moment.isoformat(timespec='seconds')} ({moment:%A}, {there.key})"

    return tell


clock = clock_tool(SystemClock())
