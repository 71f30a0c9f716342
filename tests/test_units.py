"""Quantities are printed with three significant digits."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terashard import units


def test_the_examples_of_the_module_are_true() -> None:
    assert doctest.testmod(units).failed == 0


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.show_bytes(0), "0 B"),
        (units.show_bytes(1023), "1023 B"),
        (units.show_bytes(999), "999 B"),
        (units.show_bytes(61 * 2**30), "61.0 GiB"),
        (units.show_bytes(2**60), "1020 PiB"),
        (units.show_seconds(0), "0 s"),
        (units.show_seconds(0.0123), "12.3 ms"),
        (units.show_seconds(0.9996), "1.00 s"),
        (units.show_seconds(59.94), "59.9 s"),
        (units.show_seconds(59.96), "1:00"),
        (units.show_seconds(6102), "1:41:42"),
        (units.show_seconds(90061), "1 d 1:01:01"),
        (units.show_seconds(float("inf")), "inf s"),
        (units.show_count(1, "slice"), "1 slice"),
        (units.show_count(0, "micro-batch"), "0 micro-batches"),
        (units.show_count(1234, "file"), "1,234 files"),
    ],
)
def test_quantities_are_shown(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.floats(min_value=1e-9, max_value=1e14))
def test_significant_keeps_the_value_to_half_a_percent(value: float) -> None:
    assert float(units.significant(value)) == pytest.approx(value, rel=5.1e-3)
