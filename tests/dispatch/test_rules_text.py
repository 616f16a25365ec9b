"""Rows as text: what is written is read back the same, and a table keeps every other line."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooflane.dispatch import RuleError, parse_rules
from rooflane.dispatch.rule_files import insert_row, parse_options, parse_when
from rooflane.dispatch.rules import Rule, row_text

MINE = Path("mine.toml")
NEW = {"name": "new", "when": {"d_model": 7}, "family": "chunked", "options": {}, "because": "a test"}
TABLE = """\
# The file's own words.

# why a
[[rule]]
name = "a"   # kept as it is
when = { d_model = 5 }
family = "chunked"
because = "a test"

# why b, over
# two lines
[[rule]]
name = "b"
when = { d_model = 6 }
family = "chunked"
because = "a test"
"""
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
PLAIN = st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False, allow_infinity=False), TEXT)


# Drawing the texts takes over a second where another process has the core.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(name=TEXT, because=TEXT, options=st.dictionaries(TEXT, PLAIN, max_size=3))
def test_any_row_is_read_back_as_it_was(name, because, options):
    row = NEW | {"name": name, "because": because, "options": options}
    (read,) = tomllib.loads(row_text(row))["rule"]
    assert read == row if options else read == {key: row[key] for key in row if key != "options"}


@pytest.mark.parametrize(
    ("texts", "when"),
    [
        (["seq_len<=128"], {"seq_len": {"le": 128}}),
        (["seq_len >= 64", "seq_len < 128"], {"seq_len": {"ge": 64, "lt": 128}}),
        (["d_model=64,128"], {"d_model": [64, 128]}),
        (["causal=true", "regime==launch"], {"causal": True, "regime": "launch"}),
        (["regime!=infeasible"], {"regime": {"ne": "infeasible"}}),
        (["launch_ratio>1"], {"launch_ratio": {"gt": 1.0}}),
        (["id=2"], {"id": "2"}),
        ([], {}),
    ],
)
def test_conditions_are_read_in_the_type_of_their_field(texts, when):
    found = parse_when(texts)
    assert found == when
    assert [type(value) for value in found.values()] == [type(value) for value in when.values()]
    Rule(name="r", when=found, family="f", because="b")


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["seq_len"], "is not FIELD"),
        (["seq_len<="], "is not FIELD"),
        (["seqlen<=128"], "no field is called 'seqlen'; fields: batch_size"),
        (["seq_len<=1", "seq_len<=2"], "already asked for its <="),
        (["seq_len=1", "seq_len=2"], "list its values as seq_len=A,B"),
        (["seq_len=1", "seq_len<2"], "already asked for"),
    ],
)
def test_a_condition_that_cannot_be_read_says_why(texts, words):
    with pytest.raises(RuleError, match=words):
        parse_when(texts)


def test_options_become_values():
    assert parse_options(["a=1", "b=0.5", "c=true", "d=x=y"]) == {"a": 1, "b": 0.5, "c": True, "d": "x=y"}
    with pytest.raises(RuleError, match="'a' is not key=value"):
        parse_options(["a"])


def own(table):
    return [rule.name for rule, file in zip(table.rules, table.files, strict=True) if file == MINE]


@pytest.mark.parametrize(
    ("before", "order"),
    [
        (None, ["a", "b", "new"]),
        ("a", ["new", "a", "b"]),
        ("b", ["a", "new", "b"]),
        ("launch-bound", ["a", "b", "new"]),
    ],
)
def test_a_row_goes_where_it_is_wanted_and_every_line_stays(before, order):
    text, table = insert_row(TABLE, NEW, MINE, before)
    assert own(table) == order
    lines = text.splitlines()
    rest = lines.copy()
    at = rest.index('name = "new"') - 1
    del rest[at : at + len(row_text(NEW).splitlines())]
    assert [line for line in rest if line] == [line for line in TABLE.splitlines() if line]
    # Each row keeps the comment above it.
    assert lines[lines.index("# why a") + 1] == "[[rule]]"
    assert lines[lines.index("# two lines") + 1] == "[[rule]]"
    # The row itself stands at the line the table says.
    assert lines[table.lines[own(table).index("new")] - 1 :][:2] == ["[[rule]]", 'name = "new"']


def test_a_first_row_goes_behind_the_files_own_words():
    text, _ = insert_row("# The file's own words.\n# More.\n" + TABLE[TABLE.index("[[rule]]") :], NEW, MINE, "a")
    assert text.startswith("# The file's own words.\n# More.\n[[rule]]\n" + 'name = "new"')


def test_a_new_row_stays_before_one_that_matches_everything():
    closing = '\n[[rule]]\nname = "rest"\nwhen = {}\nfamily = "chunked"\nbecause = "a test"\n'
    _, table = insert_row("replace = true\n" + TABLE + closing, NEW, MINE)
    assert own(table) == ["a", "b", "new", "rest"]


def test_the_first_row_of_a_file_brings_the_files_heading():
    text, table = insert_row("", NEW, MINE)
    assert text.startswith("# Rules of your own") and own(table) == ["new"]
    assert parse_rules(text, "mine.toml").rules == table.rules


@pytest.mark.parametrize(
    ("row", "before", "words"),
    [
        ({"family": "warp"}, None, "unknown family 'warp'"),
        ({"options": {"speed": 1}}, None, "unknown option 'speed'"),
        ({"when": {"d_model": {"over": 1}}}, None, "'over'"),
        ({"name": "a"}, None, "name of an earlier row"),
        ({}, "gone", "has no row 'gone' to put the new one before; it has: a, b"),
    ],
)
def test_a_row_that_would_not_work_is_refused(row, before, words):
    with pytest.raises(RuleError, match=words):
        insert_row(TABLE, NEW | row, MINE, before)
