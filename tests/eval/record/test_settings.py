"""Settings by device: what a quick run takes, and that a named value is kept."""

import pytest

from rooflane.eval.record.settings import SettingError, make_settings


@pytest.mark.parametrize(
    ("device", "quick", "budget", "limit", "reference", "controls"),
    [
        ("cpu", False, 1.0, None, 120.0, None),
        ("cpu", True, 0.5, 390.0, 120.0, None),
        ("cuda", False, 0.6, None, 120.0, None),
        ("cuda", True, 0.25, 270.0, 15.0, ("identity", "sdpa")),  # the compiler alone would take the five minutes
    ],
)
def test_each_device_has_its_own_defaults(device, quick, budget, limit, reference, controls):
    found = make_settings(quick=quick).on_device(device)
    assert (found.budget_s, found.time_budget_s, found.reference_budget_s) == (budget, limit, reference)
    assert found.controls == controls and found.processes == (3 if quick else 8)


@pytest.mark.parametrize(
    "named",
    [
        {"budget_s": 2.0},
        {"time_budget_s": 1000.0},
        {"reference_budget_s": 3.0},
        {"controls": ()},
        {"controls": ("compiled",)},
        {"processes": 6},
    ],
)
def test_a_named_value_is_kept(named):
    for device in ("cpu", "cuda"):
        found = make_settings(quick=True, **named).on_device(device)
        assert {name: getattr(found, name) for name in named} == named


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["budget_s", "time_budget_s", "reference_budget_s"])
def test_seconds_are_positive_and_finite(name, value):
    with pytest.raises(SettingError) as error:
        make_settings(**{name: value})
    assert error.value.field == name
