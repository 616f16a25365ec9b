"""rules new, list and explain as a user meets them: flags, questions, and tables over the shipped one."""

from __future__ import annotations

import io
import json

import pytest

from rooflane.dispatch import load_rules
from rooflane.eval import cli
from rooflane.eval.exit_codes import ExitCode

FLAGS = ["--name", "mine", "--when", "d_model=7", "--family", "chunked", "--because", "a test"]


@pytest.fixture
def rooflane(capsys, tmp_path, monkeypatch):
    """Return a function that runs one command in an empty folder: (status, output, errors)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROOFLANE_RULES", raising=False)

    def run(*arguments: str, answers: str | None = None) -> tuple[int, str, str]:
        typed = io.StringIO(answers or "")
        typed.isatty = lambda: answers is not None
        monkeypatch.setattr("sys.stdin", typed)
        with pytest.raises(SystemExit) as end:
            cli.main(list(arguments))
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_flags_write_a_row_that_routes(rooflane, tmp_path):
    status, out, err = rooflane("rules", "new", *FLAGS[:3], "id=2", *FLAGS[4:], "--option", "budget_gib=0.5")
    assert status == 0 and "my_rules.toml:5: row 'mine' written, number 1 of 8" in out
    assert "--rules my_rules.toml" in err
    (rule, *_) = load_rules(tmp_path / "my_rules.toml").rules
    assert (rule.when, rule.options, rule.because) == ({"id": "2"}, {"budget_gib": 0.5}, "a test")
    _, out, _ = rooflane("route", "published.csv", "--profile", "h200", "--rules", "my_rules.toml", "--json")
    assert {item["shape"]["id"]: item["rule"] for item in json.loads(out)}["2"] == "mine"


def test_a_terminal_is_asked_for_what_the_flags_leave_out(rooflane, tmp_path):
    answers = "mine\nseqlen<=4\nseq_len<=4\ncausal=true\n\nwarp\nchunked\nit fits\n"
    status, out, err = rooflane("rules", "new", "--into", "t.toml", answers=answers)
    assert status == 0, err
    assert "no field is called 'seqlen'" in err and "no family is called 'warp'" in err
    (rule, *_) = load_rules(tmp_path / "t.toml").rules
    assert rule.model_dump() == {
        "name": "mine",
        "when": {"seq_len": {"le": 4}, "causal": True},
        "family": "chunked",
        "options": {},
        "because": "it fits",
    }


def test_without_a_terminal_what_is_missing_is_named(rooflane, tmp_path):
    status, _, err = rooflane("rules", "new", "--name", "mine")
    assert status == ExitCode.USAGE
    assert "lacks --family, --because, --when (or --always)" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--family", "chunkd"], "no family is called 'chunkd'"),
        (["--when", "d_model<0", "--when", "d_model<1"], "already asked for"),
        (["--option", "speed=1"], "unknown option 'speed'"),
        (["--before", "gone"], "no row 'gone'"),
        (["--always"], "contradict each other"),
    ],
)
def test_a_row_that_would_not_work_leaves_the_file_as_it_was(rooflane, tmp_path, change, words):
    (tmp_path / "my_rules.toml").write_text("# nothing yet\n")
    status, _, err = rooflane("rules", "new", *FLAGS, *change)
    assert status == ExitCode.USAGE and words in " ".join(err.split())
    assert (tmp_path / "my_rules.toml").read_text() == "# nothing yet\n"


def test_the_project_table_is_the_one_written_to(rooflane, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.rooflane]\nrules = "project.toml"\n')
    (tmp_path / "project.toml").write_text("")
    status, _, err = rooflane("rules", "new", *FLAGS)
    assert status == 0 and err == "", "it is in force already: nothing to report"
    rooflane("rules", "new", "--name", "second", "--before", "mine", *FLAGS[2:])
    assert [rule.name for rule in load_rules().rules][:2] == ["second", "mine"]


def test_writing_tells_what_the_new_row_does_to_others(rooflane):
    rooflane("rules", "new", "--name", "low", "--when", "seq_len<=128", *FLAGS[4:])
    _, out, _ = rooflane(
        "rules", "new", "--name", "high", "--when", "seq_len>=128", "--family", "sdpa_flash", *FLAGS[6:]
    )
    assert "overlaps 'low'" in out and "seq_len = 128" in out


def test_list_shows_where_each_row_comes_from_and_what_is_out_of_use(rooflane):
    rooflane("rules", "new", "--name", "fits-one-sm", *FLAGS[2:])
    _, out, _ = rooflane("rules", "list", "--rules", "my_rules.toml", "--json")
    rows = json.loads(out)
    assert rows[0]["from"] == "my_rules.toml:5" and all(row["from"].startswith("shipped:") for row in rows[1:])
    assert "fits-one-sm" not in [row["name"] for row in rows[1:]]
    _, out, _ = rooflane("rules", "list", "--rules", "my_rules.toml")
    assert "my_rules.toml over the shipped rules" in out and "out of use, a row of their name stands above: fits" in out


def test_list_of_a_table_that_cannot_be_used_says_so_and_ends_with_2(rooflane, tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text('[[rule]]\nname = "x"\nwhen = { seq_len = 5 }\nfamily = "nofamily"\nbecause = "b"\n')
    status, out, _ = rooflane("rules", "list", "--rules", path)
    assert status == ExitCode.USAGE and f"error: {path}:1: rule 'x' names the unknown family 'nofamily'" in out
    status, out, err = rooflane("rules", "list", "--rules", path, "--json")
    assert status == ExitCode.USAGE and json.loads(out)[0]["family"] == "nofamily" and "unknown family" in err


def test_explain_takes_the_id_of_a_published_shape(rooflane):
    rooflane("rules", "new", *FLAGS[:2], "--when", "id=8", *FLAGS[4:])
    _, out, _ = rooflane("rules", "explain", "8", "--profile", "h200", "--rules", "my_rules.toml", "--json")
    (found,) = json.loads(out)
    assert (found["shape"], found["chosen"], found["from"]["mine"]) == ("8", "mine", "my_rules.toml:5")
    assert found["rules"]["anything-else"] == "matches, but comes after the chosen rule"
    status, _, err = rooflane("rules", "explain", "99", "--profile", "h200")
    assert status == ExitCode.USAGE and "holds no shape '99'" in err


def test_check_of_a_table_over_ours(rooflane, tmp_path):
    rooflane("rules", "new", *FLAGS)
    status, out, _ = rooflane("rules", "check", "my_rules.toml")
    assert (status, out) == (0, "my_rules.toml over the shipped rules: 8 rules, nothing wrong\n")
