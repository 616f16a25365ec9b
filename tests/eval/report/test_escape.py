"""Texts of unknown origin in every medium: they are shown, and they do nothing."""

import csv
import html
import io
import json
import re
import unicodedata

import pytest
from rich.console import Console

from rooflane.dispatch import load_profile
from rooflane.eval import render_json, render_markdown, render_readme_table, render_terminal
from rooflane.eval.campaign.campaign import Event
from rooflane.eval.cli import main
from rooflane.eval.commands import output
from rooflane.eval.commands.evaluate import Lines
from rooflane.eval.commands.reports import render_csv
from rooflane.eval.export.write import export
from rooflane.eval.report.escape import csv_cell, markdown, markdown_code, plain
from rooflane.eval.report.page import read_page, render_page, write_plot
from rooflane.eval.stats.run import create_run
from rooflane.eval.worker.candidates import load_rule_table, parse_candidate
from rooflane.shapes import Shape

# A colour, a line written over, a cleared screen, a title; reversed writing; nothing to be seen; a lone surrogate.
UNSEEN = ["\x1b[31m", "\r", "\x1b[2J", "\x1b]0;t\x07", "\u202e", "\u2066", "\u200b", "\ufeff", "\x9b1m", "\udc80"]
MARKUP = ["<img src=x>", "</td></table><script>", "<!-- table:end -->", "![i](http://a.b/c)", "[l](javascript:x)"]
MARKUP += ["`code`", "a|b", "**b**", "~~s~~", "_e_", "https://a.b/c", "www.a.b", "&lt;", "\nx\n# h", "[r]: http://a.b"]
RICH = ["[bold red]", "[/]", ":boom:", "[link=http://a.b]x[/link]"]
FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=cmd|'/c calc'!A1"]
HOSTILE = "".join(text for text in (*UNSEEN[:-1], *MARKUP, *RICH)) + "='+@-"


def hostile_run(tmp_path, make_meta, full_rows):
    """A run whose every free text is hostile: ids, names, reasons, findings, facts, notes, profile, command, rules."""
    name = f"={HOSTILE}.py"
    shapes = [Shape(f"={HOSTILE}{number}", 2, 8, 16, 2, 16, 1) for number in range(3)]
    meta = make_meta(shapes, candidates=(name,), controls=("identity",))
    # The name of a profile is checked when it is read: letters, digits, dots and dashes.
    profile = meta.profile | {"title": HOSTILE}
    meta = meta.model_copy(
        update={
            "command": HOSTILE, "rooflane_version": HOSTILE, "profile": profile, "started_at": "2026-01-02",
            "not_run": {shapes[2].id: HOSTILE},
        }
    )  # fmt: skip
    rows = []
    for row in full_rows(meta, {name: 2.0}):
        found = row.verification and row.verification.model_copy(update={"notes": [HOSTILE], "contract": [HOSTILE]})
        texts = {"reason": HOSTILE, "family": HOSTILE, "rule": HOSTILE, "contract": HOSTILE, "integrity": [HOSTILE]}
        texts |= {"environment": {"gpu": HOSTILE, "driver": HOSTILE, "commit": HOSTILE}, "verification": found}
        if row.shape_id == shapes[2].id:
            texts |= {"status": "skipped", "timing": None}
        elif row.shape_id == shapes[1].id and row.arm == name:
            texts |= {"status": "error", "timing": None}
        rows.append(row.model_copy(update=texts))
    run = create_run(tmp_path / "runs", meta)
    run.append(rows)
    return run


def unseen(text, but="\n"):
    """Return the characters of a text that nobody sees, less those that the medium needs."""
    return {c for c in text if c not in but and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


@pytest.mark.parametrize("text", UNSEEN)
def test_what_cannot_be_seen_is_written_out(text):
    shown = plain(f"a{text}b")
    assert not unseen(shown, "") and shown.startswith("a\\") and shown.endswith("b")
    assert plain(shown) == shown
    for escaped in (markdown(text), markdown_code(text), csv_cell(text)):
        assert not unseen(escaped, "")


def test_plain_text_stays_as_it_is():
    for text in ("2.00x [1.98, 2.02], 95 %", "naïve 矩阵 → ✓ 😀", "C:\\x", "a b", "mine_v2.py:build"):
        assert plain(text) == text and csv_cell(text) == text
        assert markdown(text) == text
    assert plain("two\nlines\tand a tab") == "two lines and a tab"


@pytest.mark.parametrize("text", MARKUP)
def test_markdown_shows_markup_and_does_nothing_with_it(text):
    source = markdown(text)
    assert "\n" not in source and "<" not in source
    # Each character that would begin something has a backslash before it, which itself has none.
    bare = re.sub(r"\\[!-/:-@\[-`{-~]", "", source)
    assert not re.search(r"[`|]|\]\(|\]:|!\[|\*\*|~~|https?:|www\.|&(?!amp;|lt;)|^#|\b_e_\b", bare)
    # What a reader sees is the text.
    seen = html.unescape(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", source))
    assert seen == plain(text).lstrip()


def test_a_code_span_cannot_be_closed_from_within():
    assert markdown_code("a") == "`a`"
    assert markdown_code("a`b``c") == "```a`b``c```"
    assert markdown_code("`a`") == "`` `a` ``"


@pytest.mark.parametrize("text", FORMULAS)
def test_a_spreadsheet_takes_no_text_for_a_formula(text):
    cell = csv_cell(text)
    assert cell.startswith(("'", "\\r")) and cell.endswith(text.lstrip())


def test_a_hostile_record_is_text_in_every_medium(tmp_path, make_meta, full_rows):
    run = hostile_run(tmp_path, make_meta, full_rows)
    summary = run.summary()
    for width in (80, 240):
        console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        render_terminal(summary, console, details=True)
        text = console.file.getvalue()
        assert not unseen(text) and "[bold red]" in text.replace("\n", "") and ":boom:" in text
        assert "\\x1b[31m" in text and "\\u202e" in text
    for text in (render_markdown(summary), render_readme_table(summary)):
        assert not unseen(text)
        # The command stands in a code span, which the test above is about.
        text = "\n".join(line for line in text.splitlines() if not line.startswith("- Started"))
        assert not re.search(r"<|(?<!\\)(?:\]\(|!\[|\]:|`)|https?://|www\.[a-z]", text)
        assert "<!-- table:end -->" not in text
        tables = [line for line in text.splitlines() if line.startswith("| ")]
        heads = [line for line in text.splitlines() if line.startswith("|--")]
        assert heads and tables
        widths = [len(re.split(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")]
        assert len(set(widths)) <= len(heads), "no cell has a pipe of its own"
        assert not [line for line in text.splitlines() if line.startswith("# ") and not line.startswith("# Run ")]
    assert json.loads(render_json(summary))["shapes"][0]["shape"]["id"] == run.meta.shapes[0]["id"]
    assert render_json(summary).isascii()
    cells = [cell for line in csv.reader(io.StringIO(render_csv(run.frame()))) for cell in line]
    assert any(cell.startswith("'=") for cell in cells)
    assert not any(cell.startswith(("=", "+", "-", "@")) or unseen(cell, "") for cell in cells)


@pytest.mark.slow
def test_a_hostile_record_is_text_on_the_page_and_in_a_plot(tmp_path, make_meta, full_rows):
    run = hostile_run(tmp_path, make_meta, full_rows)
    data = read_page(run)
    page = render_page(data, tmp_path)
    assert not unseen(page)
    for tag in ("<img", "<b>", "</td></table><", "<!-- table"):
        assert tag not in page
    assert page.count("<script>") == 1 and "&lt;img src=x&gt;" in page and "\\u202e" in page
    for kind in ("latency.svg", "regimes.svg"):
        write_plot(data, tmp_path / kind)
        text = (tmp_path / kind).read_text()
        assert not unseen(text) and "<img" not in text and "<script" not in text


def test_progress_lines_notes_and_errors_are_one_plain_line_each(capsys):
    shape = Shape(HOSTILE, 2, 8, 16, 2, 32, 1)
    show = Lines([shape])
    for kind in ("note", "skipped", "run"):
        show(Event(kind, 0, 1, HOSTILE, HOSTILE, "", 0, 1, HOSTILE, 1.0, None, 1))
    show(Event("shape", 0, 1, HOSTILE, "", "", 1, 1, HOSTILE, 5.0, 240.0, 1))
    output.remark("a\nforged: line", "b")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6 and lines[4] == "a forged: line"
    assert not any(unseen(line, "") for line in lines)
    with pytest.raises(SystemExit):
        main(["report", "no\x1b[31m\u202e\nrun"])
    said = capsys.readouterr().err
    assert not unseen(said) and said.count("\n") == 1 and "\\x1b[31m\\u202e run" in said


def test_a_console_takes_no_markup_from_texts(capsys):
    screen = output.console()
    for text in (*RICH, *UNSEEN[:3]):
        screen.print(text)
    said = capsys.readouterr().out
    assert not unseen(said) and all(text in said for text in RICH)


def test_the_name_of_a_shape_stays_within_an_exported_file_s_docstring():
    for name in ('"""\nimport os\nos.abort()\n"""', "\\", 'x"'):
        shape = Shape(name, 1, 16, 64, 4, 64, 2, causal=True)
        text = export([shape], parse_candidate("sdpa_flash"), load_profile("h200"), load_rule_table(None)).text
        names = {}
        exec(compile(text.split("# ruff: noqa")[0], "export", "exec"), names)
        assert "os.abort" not in text or "os" not in names
        assert plain(name) in names["__doc__"]
