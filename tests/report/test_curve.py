"""A curve in the terminal: golden pictures and edges."""

from terashard.report.curve import curve


def test_a_falling_line_is_drawn_from_the_upper_left_to_the_lower_right() -> None:
    assert curve([8, 7, 6, 5, 4, 3, 2, 1], width=4, height=2) == [
        "   8.00 ┤⠙⢦⡀⠀",
        "   1.00 ┤⠀⠀⠙⢦",
    ]


def test_a_flat_line_stays_on_one_level() -> None:
    assert curve([2.0] * 10, width=5, height=2) == ["   2.00 ┤⠉⠉⠉⠉⠉", "   2.00 ┤⠀⠀⠀⠀⠀"]


def test_many_values_are_averaged_into_the_width() -> None:
    lines = curve([float(i % 2) for i in range(1000)], width=10, height=4)
    assert all(len(line) == len("   0.00 ┤") + 10 for line in lines)


def test_nothing_is_drawn_without_values() -> None:
    assert curve([]) == []


def test_one_value_is_one_level() -> None:
    assert curve([1.5], height=1) == ["   1.50 ┤⠉"]
