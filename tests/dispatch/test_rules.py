"""The rule table: what is refused and where, and what the linter finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooflane.dispatch import REGIMES, RuleError, lint, load_rules
from rooflane.dispatch.lint import MOST_CASES, acts
from rooflane.dispatch.rules import FIELDS, Rule


def row(name, when="{}", family="one", extra=""):
    return f'[[rule]]\nname = "{name}"\nwhen = {when}\nfamily = "{family}"\nbecause = "a test"\n{extra}\n'


@pytest.fixture(autouse=True)
def two_families(fake_families):
    return fake_families(one={"options": ("size",)}, two={})


def test_rows_keep_their_order_and_lines(write_rules):
    table = load_rules(write_rules("# a comment\n" + row("a", '{ regime = "launch" }') + row("b")))
    assert [rule.name for rule in table.rules] == ["a", "b"]
    assert table.lines == (3, 9)
    assert lint(table) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[rule]\n", r"rules\.toml:2: not valid TOML"),
        (row("a") + "when = ", r"rules\.toml:8: not valid TOML"),
        ("x = '''", r"rules\.toml:2: not valid TOML"),
        ("colour = 1\n" + row("a"), r"rules\.toml:1: unknown key 'colour'"),
        ('rule = "a"', r"rules\.toml:1: `rule` is not a list"),
        ("rule = [{}]", r"rules\.toml:1: rows are not headed"),
        (row("a") + row("b", extra="colour = 1"), r"rules\.toml:13: rule 'b': colour"),
        (
            row("a", "{ seqlen = 4 }"),
            r"rules\.toml:4: rule 'a': when: no field is called 'seqlen', did you mean 'seq_len'",
        ),
        (row("ok", "{ causal = true }") + row("a", "{ seq_len = { over = 4 } }"), r"rules\.toml:10: .*'over'"),
        ('[[rule]]\nwhen = {}\nfamily = "one"\nbecause = "x"', r"rules\.toml:2: an unnamed rule: name: Field required"),
        (row("a", "4"), r"rules\.toml:4: rule 'a': when"),
        (row("a", family="three"), r"rules\.toml:2: rule 'a' names the unknown family 'three'; there are: one, two"),
        (row("a", extra="options = { colour = 1 }"), r"rules\.toml:2: .*unknown option 'colour'; one takes: size"),
        (row("a", family="two", extra="options = { size = 1 }"), r"two takes: no option"),
        (row("a", "{ causal = true }"), r"rules\.toml:2: the table ends without a catch-all"),
        ("", r"rules\.toml:1: the table ends without a catch-all"),
        (row("a", "{ causal = true }") + row("a"), r"rules\.toml:8: rule 'a' has the name of an earlier row"),
    ],
)
def test_unusable_tables_name_file_and_line(write_rules, text, complaint):
    with pytest.raises(RuleError, match=complaint):
        load_rules(write_rules(text))


def test_missing_file(tmp_path):
    with pytest.raises(RuleError, match="nowhere.toml: no such file"):
        load_rules(tmp_path / "nowhere.toml")


def test_every_error_is_reported_at_once(write_rules):
    path = write_rules(row("a", family="three") + row("a", "{ causal = true }"))
    findings = lint(load_rules(path, strict=False))
    assert [finding.kind for finding in findings] == [
        "unknown-family",
        "duplicate-name",
        "missing-catch-all",
    ]
    with pytest.raises(RuleError, match="unknown family.*earlier row.*without a catch-all"):
        load_rules(path)


@pytest.mark.parametrize(
    ("rows", "kinds"),
    [
        ([("a", "{}"), ("b", "{}")], ["unreachable"]),
        ([("a", "{ seq_len = { ge = 1 } }"), ("b", "{}")], ["unreachable"]),  # every sequence has a token
        ([("a", "{ causal = [true, false] }"), ("b", "{}")], ["unreachable"]),
        ([("a", "{ seq_len = { ge = 8 } }"), ("b", "{ seq_len = { gt = 8 } }"), ("c", "{}")], ["shadowed"]),
        ([("a", "{ seq_len = { ge = 8 } }"), ("b", "{ seq_len = [8, 9], causal = true }"), ("c", "{}")], ["shadowed"]),
        ([("a", "{ seq_len = { ge = 8 }, causal = true }"), ("b", "{ seq_len = 9 }"), ("c", "{}")], []),
        ([("a", "{ seq_len = { gt = 8 } }"), ("b", "{ seq_len = { ge = 8 } }"), ("c", "{}")], []),
        ([("a", "{ seq_len = { gt = 8, lt = 9 } }"), ("b", "{}")], ["impossible"]),  # no whole number between
        ([("a", "{ launch_ratio = { gt = 8, lt = 9 } }"), ("b", "{}")], []),
    ],
)
def test_lint_finds_rows_that_cannot_act(write_rules, rows, kinds):
    table = load_rules(write_rules("".join(row(name, when) for name, when in rows)))
    assert [finding.kind for finding in lint(table)] == kinds
    assert all(finding.severity == "warning" for finding in lint(table))


def test_a_shadowed_row_of_another_family_is_a_fallback(write_rules):
    text = row("a", "{ causal = true }") + row("b", "{ causal = true }", family="two")
    fallback, same = lint(load_rules(write_rules(text + row("c", "{ causal = true }") + row("d"))))
    assert "acts only where one refuses the shape" in fallback.message
    assert "can be removed" in same.message
    assert str(fallback).startswith(f"{fallback.where}: rule 'b'")


WHENS = st.fixed_dictionaries(
    {},
    optional={
        "seq_len": st.dictionaries(st.sampled_from(["lt", "ge", "ne"]), st.integers(1, 6), min_size=1),
        "causal": st.booleans(),
        "regime": st.lists(st.sampled_from(["launch", "compute"]), min_size=1, unique=True),
    },
)


def rule_of(when):
    return Rule(name="r", when=when, family="one", because="a test")


@given(whens=st.lists(WHENS, min_size=1, max_size=3), last=WHENS)
def test_a_row_acts_exactly_where_some_shape_reaches_it(whens, last):
    """Compared with every value that gives these conditions another result."""
    earlier, later = [rule_of(when) for when in whens], rule_of(last)
    every = [
        {"seq_len": length, "causal": causal, "regime": regime}
        for length in range(1, 9)
        for causal in (True, False)
        for regime in REGIMES
    ]
    reached = [known for known in every if later.mismatch(known) is None]
    assert (later.impossible is None) == bool(reached)
    assert acts(later, earlier) == any(all(one.mismatch(known) for one in earlier) for known in reached)
    assert later.catches_all == (reached == every)


def test_of_too_many_cases_a_sample_is_tried():
    wide = rule_of({name: {"ge": 0.5 if field.high == 1 else 2} for name, field in FIELDS.items() if field.numeric})
    assert 2 ** len(wide.when) > MOST_CASES
    everything, short, long = rule_of({}), rule_of({"seq_len": {"lt": 2}}), rule_of({"seq_len": {"ge": 2}})
    assert acts(everything, [wide])
    assert acts(everything, [wide, short])
    assert not acts(everything, [wide, short, long])


def test_mismatch_says_what_was_found_and_wanted():
    rule = Rule(name="r", when={"causal": True, "seq_len": {"ge": 8, "lt": 99}}, family="one", because="a test")
    known = dict.fromkeys(FIELDS) | {"causal": True, "seq_len": 4}
    assert rule.mismatch(known) == "seq_len is 4, the rule wants >= 8 and < 99"
    assert rule.mismatch(known | {"causal": False}) == "causal is false, the rule wants true"
    assert rule.mismatch(known | {"seq_len": 8}) is None


def test_shipped_table_is_clean(fake_families):
    settings = {name: {} for name in ("chunked", "fused", "gemm_fp16", "graph_compile", "resident", "sdpa_flash")}
    fake_families(**settings)
    table = load_rules()
    families = ["resident", "chunked", "fused", "gemm_fp16", "graph_compile", "sdpa_flash", "sdpa_flash"]
    assert [rule.family for rule in table.rules] == families
    assert lint(table) == []
    assert table.rules[-1].when == {}
