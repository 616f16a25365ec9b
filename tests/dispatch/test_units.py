"""Times and sizes in the unit that reads best."""

from rooflane.dispatch.units import duration, size


def test_times_and_sizes_have_three_digits_and_the_unit_that_fits():
    times = {0: "0", 2.5e-6: "2.5 us", 0.0123: "12.3 ms", 1: "1 s", 135.4: "135 s", 999.6: "1000 s", 7200: "2 h"}
    assert {seconds: duration(seconds) for seconds in times} == times
    sizes = {1: "1 B", 1500: "1.5 kB", 2.5e9: "2.5 GB", 41.062e12: "41.1 TB", 141e9: "141 GB"}
    assert {count: size(count) for count in sizes} == sizes
