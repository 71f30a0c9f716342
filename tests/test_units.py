"""Quantities are read the way people write them, and printed with three significant digits."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terashard import units
from terashard.errors import ConfigError


def test_the_examples_of_the_module_are_true() -> None:
    assert doctest.testmod(units).failed == 0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512", 512),
        (512, 512),
        ("16GiB", 16 * 2**30),
        ("16 gib", 16 * 2**30),
        ("16Gi", 16 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5 kB", 1500),
        ("2e3", 2000),
        ("1_000 MB", 10**9),
    ],
)
def test_bytes_are_read(text: str | int, count: int) -> None:
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("128k", 131072),
        ("4K", 4096),
        ("1k", 1024),
        ("100k", 100_000),
        ("1.5M", 1_500_000),
        ("2B", 2 * 10**9),
    ],
)
def test_tokens_are_read_as_the_field_says_them(text: str, count: int) -> None:
    assert units.parse_tokens(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("20ms", 0.02), ("1.5 h", 5400), ("5min", 300), ("3 µs", 3e-6), ("2 d", 172800)],
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert units.parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["989T", "989 TFLOPS", "989 tflop/s", "989TFLOP", 989e12])
def test_operations_are_read(text: str | float) -> None:
    assert units.parse_flops(text) == 989e12


def test_an_unknown_unit_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown unit 'GiBs'; allowed are .*GiB"):
        units.parse_bytes("16GiBs")


@pytest.mark.parametrize("text", ["", "GiB", "-1 GB", "1 2 GB", "1,5 GB", "nan"])
def test_what_is_no_quantity_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r'is no number of bytes; .*"16GiB"'):
        units.parse_bytes(text)


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
        (units.show_tokens(8412), "8.41k"),
        (units.show_tokens(999), "999"),
        (units.show_tokens(999_600), "1.00M"),
        (units.show_flops(3.2e12), "3.20 TFLOP"),
        (units.show_bytes(61 * 2**30, width=12), "    61.0 GiB"),
    ],
)
def test_quantities_are_shown(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.floats(min_value=1e-9, max_value=1e14))
def test_significant_keeps_the_value_to_half_a_percent(value: float) -> None:
    assert float(units.significant(value)) == pytest.approx(value, rel=5.1e-3)


@given(st.floats(min_value=1.0, max_value=1e15))
def test_shown_bytes_read_back_to_half_a_percent(count: float) -> None:
    assert units.parse_bytes(units.show_bytes(count)) == pytest.approx(count, rel=6e-3, abs=0.51)
