"""What the pages say exists: their links, the paths they name, the commands they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rooflane.eval import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("briefs/**/*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
# A path of the repository in backquotes: it begins with one of its folders, or is a file of its root.
REPOSITORY_PATH = re.compile(
    r"(?:shapes|baseline|families|dispatch|eval|briefs|tests|\.ci)/[\w./-]*|[A-Z]+\.md|constraints-\w+\.txt|pyproject\.toml"
)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path) -> list[str]:
    """Return the `rooflane ...` commands a page shows, inline and in code blocks."""
    text = page.read_text()
    blocks = [line for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    inline = CODE.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    shown = [*inline, *(line.split("#")[0].strip() for line in blocks)]
    return sorted({code for code in shown if code.startswith("rooflane ")})


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_lead_to_files(page: Path):
    links = [link.split("#")[0] for link in LINK.findall(page.read_text())]
    relative = [link for link in links if link and "://" not in link]
    assert [link for link in relative if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_paths_exist(page: Path):
    named = [code for code in CODE.findall(page.read_text()) if REPOSITORY_PATH.fullmatch(code)]
    assert [path for path in named if not (ROOT / path).exists()] == []


COMMANDS = sorted({(page_id(page), command) for page in PAGES for command in commands(page)})


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda text: text)
def test_shown_commands_parse(page: str, command: str, capsys: pytest.CaptureFixture[str]):
    arguments = shlex.split(command)[1:]
    if arguments[0] == "COMMAND":
        return
    # --help is acted on after the line is parsed: an unknown command or option fails first.
    with pytest.raises(SystemExit) as end:
        cli.main([*arguments, "--help"])
    assert end.value.code in (0, None), capsys.readouterr().err


def test_readme_shows_every_command():
    shown = {shlex.split(command)[1] for command in commands(ROOT / "README.md")}
    registered = {command.name for command in cli.app.registered_commands}
    assert registered | {group.name for group in cli.app.registered_groups} <= shown


def test_changelog_has_an_unreleased_section():
    assert re.search(r"^## Unreleased$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.slow
def test_readme_python_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "optimize(" in block]
    monkeypatch.chdir(ROOT)
    scope: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["y"].shape == scope["x"].shape
    assert "shape 64x128 (64x128x128 h4 f128 l4 causal)" in capsys.readouterr().out
