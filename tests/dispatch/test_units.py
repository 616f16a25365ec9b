"""Times and sizes in the unit that reads best."""

from rooflane.dispatch.units import counted, duration, rough_duration, size


def test_times_and_sizes_have_three_digits_and_the_unit_that_fits():
    times = {0: "0", 2.5e-6: "2.5 us", 0.0123: "12.3 ms", 1: "1 s", 135.4: "135 s", 999.6: "1000 s", 7200: "2 h"}
    assert {seconds: duration(seconds) for seconds in times} == times
    sizes = {1: "1 B", 1500: "1.5 kB", 2.5e9: "2.5 GB", 41.062e12: "41.1 TB", 141e9: "141 GB"}
    assert {count: size(count) for count in sizes} == sizes
    # Rounding to three digits must not print 1e+03.
    assert size(999.6e6) == "1000 MB"


def test_a_long_time_has_the_digits_a_progress_display_needs():
    times = {45.4: "45 s", 240: "4 min", 7500: "2 h 05 min"}
    assert {seconds: rough_duration(seconds) for seconds in times} == times


def test_a_noun_follows_its_number():
    assert [counted(count, "shape") for count in (0, 1, 2)] == ["0 shapes", "1 shape", "2 shapes"]
    assert [counted(count, "process") for count in (1, 3)] == ["1 process", "3 processes"]
