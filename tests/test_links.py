"""What the pages say exists, and is easy to read: links, paths, commands, terms, sentence length."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from rooflane.eval import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted(ROOT.glob("docs/*.md")) + sorted(ROOT.glob("briefs/**/*.md"))
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)
# A path of the repository in backquotes: it begins with one of its folders, or is a file of its root.
REPOSITORY_PATH = re.compile(
    r"(?:shapes|baseline|families|dispatch|eval|briefs|docs|tests|\.ci)/[\w./-]*|[A-Z]+\.md|constraints-\w+\.txt|"
    r"pyproject\.toml|[\w./-]+/[\w-]+\.py"
)
README_WORDS = 1400
GLOSSARY_TERMS = 50
SENTENCE_WORDS = 30
# Words of the project's old dialect; the second entry of each pair is the standard word.
OLD_WORDS = {
    "afresh": "again, or in a fresh process",
    "owed": "pending",
    "foregone": "skipped",
    "spoilt": "disturbed",
    "for want of": "for lack of",
    "held against": "compared with",
    "held to": "checked against",
    "told by": "reported by",
    "mend": "fix",
    "mended": "fixed",
    "awake": "busy-waiting",
    "asleep": "sleeping",
    "calm": "fast or quiet",
    "calmer": "faster",
    "calmest": "fastest",
    "lent": "given",
    "desk": "session",
    "courier": "producer",
    "twins": "paired warps",
    "anew": "again",
    "the look": "the check",
    "looked at": "checked",
}
# The project's own terms. A page that uses one relies on the glossary.
# fmt: off
COINED = (
    "anchor", "arm", "block", "borderline", "brief", "candidate", "contract", "control", "copy", "dispatched",
    "family", "finding", "fingerprint", "floor", "gate", "harness dividend", "idle-start", "judge", "ledger", "no-op",
    "profile", "promise", "record", "regime", "rule", "shape", "stress input", "verdict", "window", "worker",
)
# fmt: on


def prose(text: str) -> list[str]:
    """Return a page's sentences outside tables, code and what is generated."""
    text = GENERATED.sub("", FENCED.sub("", text))
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#", "!["))]
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", "\n".join(lines), flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", CODE.sub("CODE", text)).replace("*", "")
    return [part for block in re.split(r"\n\s*\n", text) for part in re.split(r"(?<=[.?!])\s+", block) if part.strip()]


def commands(text: str) -> list[str]:
    """Return the `rooflane ...` commands a page shows, inline and in code blocks."""
    blocks = [line for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    inline = CODE.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    shown = [*inline, *(line.split("#")[0].strip() for line in blocks)]
    return sorted({code for code in shown if code.startswith("rooflane ")})


def test_relative_links_lead_to_files():
    missing = []
    for page, text in TEXTS.items():
        for link in (link.split("#")[0] for link in LINK.findall(text)):
            if link and "://" not in link and not ((ROOT / page).parent / link).exists():
                missing.append((page, link))
    assert missing == []


def test_named_paths_and_modules_exist():
    missing = []
    for page, text in TEXTS.items():
        named = [code for code in CODE.findall(text) if REPOSITORY_PATH.fullmatch(code)]
        places = (ROOT, (ROOT / page).parent)
        missing += [(page, path) for path in named if not any((place / path).exists() for place in places)]
        modules = re.findall(r"python -m (rooflane[\w.]*)", text)
        missing += [(page, module) for module in modules if importlib.util.find_spec(module) is None]
    assert missing == []


def test_shown_commands_parse(capsys: pytest.CaptureFixture[str]):
    failed = []
    for page, command in sorted({(page, command) for page, text in TEXTS.items() for command in commands(text)}):
        arguments = shlex.split(command)[1:]
        if arguments[0] == "COMMAND":
            continue
        # --help is acted on after the line is parsed: an unknown command or option fails first.
        with pytest.raises(SystemExit) as end:
            cli.main([*arguments, "--help"])
        if end.value.code not in (0, None):
            failed.append(f"{page}: {command}: {capsys.readouterr().err}")
    assert not failed, "\n".join(failed)


def test_readme_shows_every_command():
    shown = {shlex.split(command)[1] for command in commands(TEXTS["README.md"])}
    registered = {command.name for command in cli.app.registered_commands}
    assert registered | {group.name for group in cli.app.registered_groups} <= shown


def test_changelog_has_an_unreleased_section():
    assert re.search(r"^## Unreleased$", TEXTS["CHANGELOG.md"], re.MULTILINE)


def test_the_readme_is_short():
    words = len(GENERATED.sub("", TEXTS["README.md"]).split())
    assert words <= README_WORDS, f"{words} words without the generated table"


def test_the_glossary_is_short_sorted_and_covers_the_projects_terms():
    lines = [line for line in TEXTS["docs/glossary.md"].splitlines() if line.startswith("| ")][1:]
    terms = [line.split(" | ")[0].removeprefix("| ") for line in lines]
    assert len(terms) == len(set(terms)) <= GLOSSARY_TERMS
    assert terms == sorted(terms, key=lambda term: term.lower().replace("_", " "))
    described = {name.strip() for term in terms for name in term.split(",")}
    pages = "\n".join(text for page, text in TEXTS.items() if page != "docs/glossary.md").lower()
    for term in COINED:
        assert term in described, f"{term!r} is used and not in the glossary"
        assert re.search(rf"\b{re.escape(term)}", pages), f"{term!r} is in the list of terms and on no page"
    unused = [term for term in described if term.lower() not in pages]
    assert not unused, "terms of the glossary that no page uses"


def test_no_sentence_is_long():
    long = [
        f"{page}: {len(sentence.split())} words: {sentence}"
        for page, text in TEXTS.items()
        for sentence in prose(text)
        if len(sentence.split()) > SENTENCE_WORDS
    ]
    assert not long, "\n".join(long)


def test_no_page_uses_the_old_words():
    found = []
    for page, text in TEXTS.items():
        # A hyphen before a word: the name of a record, such as h200-afresh.
        lowered = CODE.sub("", LINK.sub("]", GENERATED.sub("", FENCED.sub("", text)))).lower()
        used = [old for old in OLD_WORDS if re.search(rf"(?<![\w-]){old}\b", lowered)]
        found += [f"{page}: {old!r}: write {OLD_WORDS[old]!r}" for old in used]
    assert not found, "\n".join(found)
