"""Conditions: which values satisfy them, and which values are enough to compare two of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooflane.dispatch import classify
from rooflane.dispatch.rules import FIELDS, corner_values, facts, parse_condition

NUMBERS = st.integers(-2, 12)
TABLES = st.dictionaries(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]), NUMBERS, min_size=1)
CONDITIONS = st.one_of(NUMBERS, st.lists(NUMBERS, min_size=1, max_size=4), TABLES)
TESTS = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}
# The domain of seq_len is every whole number from 1 on: past 12 all conditions above behave the same.
DOMAIN = range(1, 16)


def holds(raw, value):
    if isinstance(raw, dict):
        return all(TESTS[op](value, bound) for op, bound in raw.items())
    return value in raw if isinstance(raw, list) else value == raw


@given(raw=CONDITIONS)
def test_a_condition_holds_for_what_its_comparisons_hold_for(raw):
    condition = parse_condition("seq_len", raw)
    assert [condition.holds(value) for value in DOMAIN] == [holds(raw, value) for value in DOMAIN]


@given(first=CONDITIONS, second=CONDITIONS)
def test_corner_values_show_every_pair_of_answers(first, second):
    """What no corner value shows, no value of the field shows: the comparison of rows rests on this."""
    conditions = [parse_condition("seq_len", raw) for raw in (first, second)]
    shown = {tuple(one.holds(value) for one in conditions) for value in corner_values("seq_len", conditions)}
    assert shown == {tuple(one.holds(value) for one in conditions) for value in DOMAIN}


@given(first=TABLES, second=TABLES, value=st.floats(0.001, 20))
def test_corner_values_show_every_pair_of_answers_of_real_numbers(first, second, value):
    conditions = [parse_condition("launch_ratio", raw) for raw in (first, second)]
    shown = {tuple(one.holds(value) for one in conditions) for value in corner_values("launch_ratio", conditions)}
    assert tuple(one.holds(value) for one in conditions) in shown


@pytest.mark.parametrize(
    ("field", "raw", "values"),
    [
        # A sequence has a token at least.
        ("seq_len", {"ge": 1}, (1, 2)),
        ("seq_len", {"gt": 8.5}, (1, 2, 7, 8, 9, 10)),
        # A share lies between 0 and 1, both included; a launch ratio is above 0.
        ("attention_share", {"ge": 0.5}, (0, 0.25, 0.5, 0.75, 1)),
        ("launch_ratio", {"lt": 1}, (0.5, 1, 2)),
        ("causal", True, (True, False)),
        ("profile", {"ne": "h200"}, ("h200", "(another)")),
    ],
)
def test_corner_values_are_what_the_field_can_have(field, raw, values):
    assert corner_values(field, [parse_condition(field, raw)]) == values


def test_every_field_has_a_value_inside_its_domain(published, h200):
    shape = published["8"]
    known = facts(shape, h200, classify(shape, h200))
    assert known.keys() == FIELDS.keys()
    for name, value in known.items():
        assert FIELDS[name].has(value)
        assert isinstance(value, FIELDS[name].kind)
        assert parse_condition(name, value).holds(value)


@pytest.mark.parametrize(
    ("field", "raw", "complaint"),
    [
        ("seq_length", 5, "no field is called 'seq_length', did you mean 'seq_len'. fields: .*seq_len"),
        ("seq_len", "long", "'long' is not a number"),
        ("seq_len", True, "True is not a number"),
        ("seq_len", {"ge": float("nan")}, "nan is not a number"),
        ("seq_len", {"over": 5}, "no comparison is called 'over'; accepted here: lt, le, gt, ge, eq, ne"),
        ("seq_len", {}, "the table is empty"),
        ("seq_len", [], "the list is empty"),
        ("seq_len", [1, "x"], "'x' is not a number"),
        ("regime", "fast", "'fast' is not one of infeasible, launch, bandwidth, compute"),
        ("regime", {"gt": "launch"}, "no comparison is called 'gt'; accepted here: eq, ne"),
        ("causal", 1, "1 is not one of True, False"),
        ("causal", "true", "'true' is not one of True, False"),
        ("profile", 200, "200 is not a string"),
    ],
)
def test_bad_conditions_say_what_is_accepted(field, raw, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_condition(field, raw)
