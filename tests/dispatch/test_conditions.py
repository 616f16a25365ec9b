"""Conditions: what they allow, and that one is said to hold another exactly when it does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooflane.dispatch import classify
from rooflane.dispatch.allowed import Allowed
from rooflane.dispatch.conditions import FIELDS, facts, parse_condition

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
def test_allowed_values_are_those_the_comparisons_hold_for(raw):
    allowed = parse_condition("seq_len", raw)
    assert [allowed.contains(value) for value in DOMAIN] == [holds(raw, value) for value in DOMAIN]
    assert allowed.empty == (not any(holds(raw, value) for value in DOMAIN))


@given(first=TABLES, second=CONDITIONS)
def test_covering_is_exact_for_one_span(first, second):
    covers = parse_condition("seq_len", first).covers(parse_condition("seq_len", second))
    assert covers == all(holds(first, value) for value in DOMAIN if holds(second, value))


@given(first=CONDITIONS, second=CONDITIONS)
def test_covering_is_never_claimed_wrongly(first, second):
    if parse_condition("seq_len", first).covers(parse_condition("seq_len", second)):
        assert all(holds(first, value) for value in DOMAIN if holds(second, value))


@given(first=TABLES, second=TABLES, value=st.floats(0.001, 20))
def test_covering_of_real_numbers_is_never_claimed_wrongly(first, second, value):
    wide, narrow = parse_condition("launch_ratio", first), parse_condition("launch_ratio", second)
    if wide.covers(narrow) and narrow.contains(value):
        assert wide.contains(value)


@pytest.mark.parametrize(
    ("field", "wide", "narrow", "covers"),
    [
        ("seq_len", {"gt": 4}, {"ge": 5}, True),  # the same whole numbers
        ("launch_ratio", {"gt": 4}, {"ge": 5}, True),
        ("launch_ratio", {"gt": 5}, {"ge": 5}, False),
        ("launch_ratio", {"ge": 5}, {"gt": 5}, True),
        ("launch_ratio", {"ne": 5}, {"gt": 4, "lt": 6}, False),
        ("launch_ratio", {"ne": 5}, {"gt": 5}, True),
        ("attention_share", {"le": 1}, {"ge": 0.2}, True),  # a share ends at 1
        ("regime", ["launch", "compute"], "launch", True),
        ("regime", "launch", ["launch", "compute"], False),
        ("regime", {"ne": "launch"}, ["bandwidth", "compute"], True),
        ("causal", {"ne": True}, False, True),
        ("profile", {"ne": "h200"}, "h100", True),
        ("profile", {"ne": "h200"}, "h200", False),
        ("profile", {"ne": "h200"}, {"ne": "h100"}, False),
        ("profile", ["h200", "h100"], {"ne": "l4"}, False),
    ],
)
def test_covering_by_example(field, wide, narrow, covers):
    assert parse_condition(field, wide).covers(parse_condition(field, narrow)) is covers


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_a_value_inside_its_domain(name, published, h200):
    shape = published["8"]
    value = facts(shape, h200, classify(shape, h200))[name]
    assert FIELDS[name].domain.contains(value)
    assert isinstance(value, FIELDS[name].kind)
    assert parse_condition(name, value).contains(value)


@pytest.mark.parametrize(
    ("field", "raw", "complaint"),
    [
        ("seq_length", 5, "no field is called 'seq_length'; fields: .*seq_len"),
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


def parsed_or_none(raw):
    """Return what a condition allows, None for one that is refused: the domain of seq_len begins at 1."""
    try:
        return parse_condition("seq_len", raw)
    except ValueError:
        return None


@given(first=CONDITIONS, second=CONDITIONS)
def test_common_and_without_part_the_values_between_them(first, second):
    mine, theirs = parsed_or_none(first), parsed_or_none(second)
    if mine is None or theirs is None:
        return
    common, rest = mine.common(theirs), mine.without(theirs)
    for value in DOMAIN:
        assert common.contains(value) == (mine.contains(value) and theirs.contains(value))
        assert rest.contains(value) == (mine.contains(value) and not theirs.contains(value))
    assert common.empty == (not any(map(common.contains, DOMAIN)))
    assert rest.empty == (not any(map(rest.contains, DOMAIN)))


ALLOWED_WORDS = st.builds(Allowed, words=st.frozensets(st.sampled_from("abc")), inverted=st.booleans())


@given(mine=ALLOWED_WORDS, theirs=ALLOWED_WORDS)
def test_common_and_without_of_words(mine, theirs):
    for word in "abcd":
        assert mine.common(theirs).contains(word) == (mine.contains(word) and theirs.contains(word))
        assert mine.without(theirs).contains(word) == (mine.contains(word) and not theirs.contains(word))
