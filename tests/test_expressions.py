"""The expression evaluator computes what it should, and nothing that it should not."""

from __future__ import annotations

import pickle
import time

import pytest

from ktune.device import compile_target
from ktune.space.expressions import DEEPEST, LONGEST, Comparison, Expression, ExpressionError

NAMES = {"m": 4096, "n": 50257, "word": "tile", "flag": True, "device": compile_target("sm_90")}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * m + 1", 8193),
        ("-m // 3 % 7", -4096 // 3 % 7),
        ("m / 8192", 0.5),
        ("cdiv(n, 1000)", 51),
        ("next_power_of_two(n)", 65536),
        ("log2(m)", 12.0),
        ("min(m, n, 7)", 7),
        ("max(m, n)", 50257),
        ("1 <= m < n", True),
        ("1 <= m < 2", False),
        ("word in ['row', 'tile']", True),
        ("word not in ('row', 'tile')", False),
        ("word == 'tile' and not m > n", True),
        ("m > n or flag", True),
        ("flag == true", True),
        ("m if word == 'row' else n", 50257),
        ("device.shared_memory", 232448),
        ("device.capability >= 90 and device.backend == 'cuda'", True),
        ("device.warp_size", 32),
        ("  m  ", 4096),
        ("m > 1 and\nn > 1", True),
    ],
)
def test_values(text: str, value: object) -> None:
    assert Expression(text).evaluate(NAMES) == value


def test_names_and_comparisons() -> None:
    expression = Expression("n > m and word == 'tile' and device.arch in ['a', 'b'] and n > 1")
    assert expression.names == ("n", "m", "word", "device")
    assert expression.columns["word"] == 10
    assert expression.comparisons == (Comparison("word", "tile", 18),)


def test_a_false_side_is_not_evaluated() -> None:
    assert Expression("m == 0 or n // m > 1").holds({"m": 0, "n": 1})
    assert Expression("1 if m == 0 else n // m").evaluate({"m": 0, "n": 1}) == 1


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("", 0, "is empty"),
        ("m +", 2, "cannot be read"),
        ("m = 1", 2, "write == to compare"),
        ("m > 1) or (n", 5, "cannot be read"),
        ("10 ** 10 ** 10", 0, "a power"),
        ("1 << 60", 0, "not allowed"),
        ("m + __import__('os')", 4, "only these functions"),
        ("().__class__", 0, "only device has attributes"),
        ("device.__class__", 0, "device has no '__class__'"),
        ("device.shared_memoryy", 0, "did you mean 'shared_memory'?"),
        ("device.name.upper()", 0, "only these functions"),
        ("device.name.upper", 0, "only device has attributes"),
        ("device == 1", 0, "write device.NAME"),
        ("m > 1 and device['name']", 10, "indexing"),
        ("[x for x in [1]]", 0, "ListComp"),
        ("lambda: 1", 0, "a lambda"),
        ("(m := 1)", 1, "NamedExpr"),
        ("f'{m}'", 0, "JoinedStr"),
        ("min(*[1, 2], 3)", 4, "* is not allowed"),
        ("max(m, n, key=n)", 0, "plain argument"),
        ("log2(m, 2)", 0, "log2 takes 1"),
        ("min == 1", 0, "min is a function"),
        ("m in n", 5, "literal list"),
        ("m == [1]", 5, "literal list"),
        ("m is 1", 0, "'is' is not allowed"),
        ("~m", 0, "may stand before"),
        ("m > 1j", 4, "not a number"),
        ("m > None", 4, "not a number"),
        ("m > 1e999", 4, "too large"),
        ("1" * 400, 0, "too large"),
        ("'é' == word and q.r", 16, "only device"),
        ("not " * (DEEPEST + 1) + "flag", 4 * DEEPEST, "deeper"),
        ("m + " * LONGEST + "m", 0, "longer"),
        ("(" * 900 + "m" + ")" * 900, None, "cannot be read"),
        ("-" * 1500 + "m", None, "dee"),
    ],
)
def test_refused_when_compiled(text: str, column: int | None, reason: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        Expression(text)
    assert reason in caught.value.reason
    assert column is None or caught.value.column == column


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("'a' * 1000000000", "is not a number"),
        ("word * m", "is not a number"),
        ("word + word", "is not a number"),
        ("flag + 1", "is not a number"),
        ("m * m * m * m * m * m", "too large"),
        ("next_power_of_two(4000000000000000000 + 4000000000000000000)", "too large"),
        ("next_power_of_two(0.5)", "whole number"),
        ("m // 0", "cannot compute"),
        ("m % (n - n)", "cannot compute"),
        ("log2(0)", "cannot compute"),
        ("word < 1", "cannot be ordered"),
        ("1 + unknown", "'unknown' has no value"),
    ],
)
def test_refused_when_evaluated(text: str, reason: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        Expression(text).evaluate(NAMES)
    assert reason in caught.value.reason


def test_a_condition_is_true_or_false() -> None:
    with pytest.raises(ExpressionError, match="gives 4096; it must be true or false"):
        Expression("m").holds(NAMES)


def test_expressions_travel_to_other_processes() -> None:
    expression = Expression("m + n")
    again = pickle.loads(pickle.dumps(expression))
    assert again == expression
    assert again.evaluate(NAMES) == 54353


def test_an_evaluation_takes_microseconds() -> None:
    expression = Expression("(m + 2 * n) * 2 <= device.shared_memory and word == 'tile'")
    start = time.process_time()
    for _ in range(1000):
        expression.evaluate(NAMES)
    assert time.process_time() - start < 0.1
