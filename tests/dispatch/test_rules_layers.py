"""The user's table over the shipped one: which is found, what comes first, and which rows the linter compares."""

from __future__ import annotations

import pytest

from rooflane.dispatch import RuleError, lint, load_profile, load_rules, optimize, parse_rules, route
from rooflane.dispatch.rules import SHIPPED_RULES

SHIPPED_NAMES = [rule.name for rule in load_rules("shipped").rules]


def row(name, when="{}", family="chunked", extra=""):
    return f'[[rule]]\nname = "{name}"\nwhen = {when}\nfamily = "{family}"\nbecause = "a test"\n{extra}\n'


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory of the user's, two folders deep, without a variable set."""
    here = tmp_path / "project" / "src"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.delenv("ROOFLANE_RULES", raising=False)
    return here


def write(path, text):
    path.write_text(text)
    return path


def names(table):
    return [rule.name for rule in table.rules]


def test_without_a_table_of_the_users_ours_stands_alone(project):
    table = load_rules()
    assert (table.path, table.source, names(table)) == (SHIPPED_RULES, "shipped", SHIPPED_NAMES)


def test_the_users_rows_come_first_and_ours_follow(project, published):
    path = write(project / "mine.toml", row("mine", '{ id = "2" }') + row("more", "{ d_model = 7 }"))
    table = load_rules(path)
    assert names(table) == ["mine", "more", *SHIPPED_NAMES]
    assert [table.place(index) for index in (0, 1, 2)] == [f"{path}:1", f"{path}:7", f"shipped:{table.lines[2]}"]
    h200 = load_profile("h200")
    assert route(published["2"], h200, table).rule.name == "mine"
    assert route(published["1"], h200, table).rule == route(published["1"], h200, load_rules("shipped")).rule
    assert lint(table) == []


def test_replace_leaves_ours_out_and_must_then_catch_all(project):
    path = write(project / "mine.toml", "replace = true\n" + row("mine"))
    assert names(load_rules(path)) == ["mine"]
    write(path, "replace = true\n" + row("mine", "{ causal = true }"))
    with pytest.raises(RuleError, match=r"mine\.toml:2: the table ends without a catch-all"):
        load_rules(path)
    write(path, 'replace = "yes"\n' + row("mine"))
    with pytest.raises(RuleError, match="replace is 'yes'"):
        load_rules(path)


def test_a_row_of_a_shipped_name_puts_that_one_out_of_use(project):
    table = load_rules(write(project / "mine.toml", row(SHIPPED_NAMES[1], "{ seq_len = { ge = 9 } }")))
    assert names(table) == [SHIPPED_NAMES[1], SHIPPED_NAMES[0], *SHIPPED_NAMES[2:]]
    assert table.left_out == (SHIPPED_NAMES[1],)
    # So a copy of the whole shipped table, changed or not, is used as it stands.
    copy = load_rules(write(project / "copy.toml", SHIPPED_RULES.read_text()))
    assert names(copy) == SHIPPED_NAMES and set(copy.files) == {project / "copy.toml"}
    assert lint(copy) == []


def test_the_first_that_names_a_table_wins(project, monkeypatch):
    for name in ("given", "variable", "project"):
        write(project / f"{name}.toml", row(name, "{ d_model = 7 }"))
    write(project.parent / "pyproject.toml", '[tool.rooflane]\nrules = "src/project.toml"\n')
    # A nearer project file without the section is passed over, even one that is no TOML.
    write(project / "pyproject.toml", "[broken")
    assert names(load_rules())[0] == "project"
    assert load_rules().source == f"[tool.rooflane] of {project.parent / 'pyproject.toml'}"
    monkeypatch.setenv("ROOFLANE_RULES", "variable.toml")
    assert (names(load_rules())[0], load_rules().source) == ("variable", "ROOFLANE_RULES")
    assert names(load_rules("given.toml"))[0] == "given"
    # Our rules alone, whatever the environment says.
    assert names(load_rules("shipped")) == SHIPPED_NAMES
    monkeypatch.setenv("ROOFLANE_RULES", "shipped")
    assert names(load_rules()) == SHIPPED_NAMES
    monkeypatch.setenv("ROOFLANE_RULES", "")
    assert names(load_rules())[0] == "project"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ('[tool.rooflane]\nrule = "a.toml"\n', r"holds one key, rules"),
        ("[tool.rooflane]\nrules = 3\n", r"rules is 3; it is the path"),
        ("[tool.rooflane]\nrules = \n", r"pyproject\.toml:2: not valid TOML"),
        ('[tool.rooflane]\nrules = "gone.toml"\n', r"gone\.toml: no such file"),
        ("[tool]\nrooflane = 1\n# tool.rooflane\n", r"holds one key"),
    ],
)
def test_a_wrong_section_names_the_project_file(project, section, words):
    write(project / "pyproject.toml", section)
    with pytest.raises(RuleError, match=words):
        load_rules()


def test_the_variable_of_a_missing_file_says_so(project, monkeypatch):
    monkeypatch.setenv("ROOFLANE_RULES", "nowhere.toml")
    with pytest.raises(RuleError, match="nowhere.toml: no such file, and ROOFLANE_RULES names it"):
        load_rules()


def test_optimize_takes_the_projects_table(project, small, monkeypatch):
    import torch

    from rooflane.baseline import build_baseline

    write(project / "mine.toml", row("mine", f"{{ d_model = {small.d_model} }}"))
    monkeypatch.setenv("ROOFLANE_RULES", "mine.toml")
    model = build_baseline(small, "cpu", seed=1)
    fast = optimize(model, small)
    assert (fast.route.rule.name, fast.route.family) == ("mine", "chunked")
    x = torch.randn(small.batch_size, small.seq_len, small.d_model)
    with torch.inference_mode():
        assert torch.allclose(fast(x), model(x), atol=1e-5)


def test_a_tables_text_is_the_table_again_and_its_digest_is_of_the_rows(project):
    text = row("mine", "{ seq_len = { ge = 9, lt = 20 }, regime = ['launch'] }", extra="options = { budget_gib = 0.5 }")
    table = load_rules(write(project / "mine.toml", "# a remark\n" + text))
    again = parse_rules(table.text(), "elsewhere")
    assert again.rules == table.rules and again.left_out == ()
    assert again.digest() == table.digest()
    moved = load_rules(write(project / "other.toml", text))
    assert moved.digest() == table.digest()
    changed = load_rules(write(project / "other.toml", text.replace("lt = 20", "lt = 21")))
    assert changed.digest() != table.digest()


def kinds(path):
    return [finding.kind for finding in lint(load_rules(path, strict=False))]


def test_rows_over_ours_are_what_the_layer_is_for(project):
    # Both cover shipped rows, and neither is a fault.
    path = write(project / "mine.toml", row("mine", "{ seq_len = { le = 512 } }") + row("m2", "{ d_model = 5 }"))
    assert kinds(path) == []


def test_rows_that_leave_ours_nothing_are_told_once(project):
    path = write(project / "mine.toml", row("all"))
    (finding,) = lint(load_rules(path))
    assert (finding.kind, finding.severity) == ("hides-shipped", "warning")
    assert "replace = true" in finding.message and finding.where == f"{path}:1"
    halves = row("short", "{ seq_len = { lt = 9 } }") + row("long", "{ seq_len = { ge = 9 } }", "sdpa_flash")
    assert kinds(write(path, halves)) == ["hides-shipped"]


@pytest.mark.parametrize(
    ("whens", "found"),
    [
        # Two rows hide a third together, in numbers, in words, and in both.
        (["{ seq_len = { le = 8 } }", "{ seq_len = { gt = 8 } }", "{ d_model = 7 }"], ["shadowed"]),
        (["{ causal = true }", "{ causal = false }", "{ d_model = 7 }"], ["shadowed"]),
        (["{ causal = true }", "{ causal = false, seq_len = { ge = 9 } }", "{ seq_len = 10 }"], ["shadowed"]),
        (["{ causal = true }", "{ causal = false, seq_len = { ge = 9 } }", "{ d_model = 7 }"], []),
        (['{ id = { ne = "x" } }', '{ id = "x" }', "{ d_model = 7 }"], ["shadowed"]),
        # A gap of one value is enough to act in.
        (["{ seq_len = { lt = 8 } }", "{ seq_len = { gt = 8 } }", "{ d_model = 7 }"], []),
        # Real numbers lie between two bounds, where whole ones have none.
        (["{ margin = { le = 2 } }", "{ margin = { ge = 3 } }", "{ d_model = 7 }"], []),
        (["{ seq_len = { le = 2 } }", "{ seq_len = { ge = 3 } }", "{ d_model = 7 }"], ["shadowed"]),
        # The last row for everything is no fault where nothing is left to it, but for a second one.
        (["{ causal = true }", "{ causal = false }"], []),
        (["{}"], ["unreachable"]),
    ],
)
def test_rows_hidden_by_several_others_are_found(write_rules, whens, found):
    families = ["chunked", "sdpa_flash", "gemm_fp16"]
    text = "".join(row(f"row {at}", when, families[at]) for at, when in enumerate(whens))
    path = write_rules(text + row("last", family="graph_compile"))
    assert kinds(path) == found


@pytest.mark.parametrize(
    ("first", "second", "part"),
    [
        # Bounds that meet in one value, the same field or with others beside it.
        ("{ seq_len = { le = 128 } }", "{ seq_len = { ge = 128 } }", "seq_len = 128"),
        ("{ seq_len = { le = 128 }, causal = true }", "{ seq_len = { ge = 128 }, d_model = 64 }", "seq_len = 128"),
        ("{ seq_len = { ge = 64, le = 256 } }", "{ seq_len = { gt = 200, lt = 512 } }", "seq_len = 201"),
        ('{ regime = ["launch", "compute"] }', '{ regime = ["compute", "bandwidth"] }', "regime = compute"),
        (
            "{ seq_len = { le = 64 }, d_model = { le = 9 } }", "{ seq_len = { le = 9 }, d_model = { le = 64 } }",
            "seq_len = 1 and d_model = 1",
        ),
    ],
)  # fmt: skip
def test_accidental_overlaps_name_the_part_and_both_lines(write_rules, first, second, part):
    path = write_rules(row("a", first) + row("b", second, "sdpa_flash") + row("last", family="graph_compile"))
    (finding,) = lint(load_rules(path))
    assert (finding.kind, finding.severity, finding.where) == ("overlap", "warning", f"{path}:8")
    text = f"overlaps 'a' (line 2): both match where, for example, {part}, and 'a' sends the shape to chunked"
    assert text in finding.message


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("{ seq_len = { lt = 128 } }", "{ seq_len = { ge = 128 } }"),
        # A ladder: the later row holds the earlier one, or asks something else.
        ("{ seq_len = { le = 128 } }", "{ seq_len = { le = 512 } }"),
        ("{ seq_len = { le = 128 } }", "{ d_model = { ge = 64 } }"),
        ("{ seq_len = 128 }", "{ seq_len = { ge = 128 }, causal = true }"),
        ("{ seq_len = { le = 128 }, causal = true }", "{ seq_len = { ge = 128 }, causal = false }"),
    ],
)
def test_a_ladder_is_no_accident(write_rules, first, second):
    path = write_rules(row("a", first) + row("b", second, "sdpa_flash") + row("last", family="graph_compile"))
    assert kinds(path) == []


def test_an_overlap_that_changes_nothing_is_none(write_rules):
    rows = row("a", "{ seq_len = { le = 128 } }") + row("b", "{ seq_len = { ge = 128 } }")
    assert "overlap" not in kinds(write_rules(rows + row("last", "{}", "sdpa_flash")))


def test_each_fault_is_one_finding(write_rules):
    text = (
        row("typo", "{ seqlen = 4 }")
        + row("slip", family="chunkd")
        + row("option", "{ d_model = 3 }", extra="options = { budget = 1 }")
        + '[[rule]]\nname = "key"\nwhen = {}\nfamly = "chunked"\nbecause = "a test"\n'
        + row("both", "{ seqlen = 4, d_modl = 3 }", family="chunkd")
        + row("last")
    )
    found = lint(load_rules(write_rules(text), strict=False))
    assert [(finding.rule, finding.kind) for finding in found] == [
        ("typo", "malformed"), ("slip", "unknown-family"), ("option", "unknown-option"), ("key", "malformed"),
        ("both", "malformed"), ("both", "malformed"), ("both", "unknown-family"),
    ]  # fmt: skip
    assert "did you mean 'chunked'?" in found[1].message
    assert "did you mean 'family'?" in found[3].message
    assert [int(finding.where.rpartition(":")[2]) for finding in found] == [4, 8, 14, 23, 27, 27, 28]


def test_an_unread_last_row_is_not_also_a_missing_catch_all(write_rules):
    assert kinds(write_rules(row("a", "{ causal = true }") + row("last", "{ colour = 1 }"))) == ["malformed"]
    assert kinds(write_rules(row("last", "{ colour = 1 }") + row("a", "{ causal = true }"))) == [
        "malformed", "missing-catch-all",
    ]  # fmt: skip
