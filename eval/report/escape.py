"""Text of unknown origin made safe to show, one function a medium; every renderer of reports passes its texts here.

Names of files and shapes, exceptions and facts of the machine reach a report as they are. They may hold terminal
codes, characters that reverse the direction of writing, or markup. What cannot be seen is written out as `\\x1b` or
`\\u202e`, so the reader sees that it was there. JSON needs no function of its own: `json.dumps` writes ASCII.
"""

from __future__ import annotations

import re
import unicodedata

# A line begins a list, a quotation or a heading of Markdown with one of these.
BLOCK = re.compile(r"[#>]|[-+*](?=\s|--)|=(?==)|\d+(?=[.)]\s)")
# Intervals such as `[0.98, 1.02]` and `[95%]` stay readable, unless a link's target could follow.
FIGURES = re.compile(r"\[(?=[^\]]*\d)[-\d.,% einfa]+\](?![\[(:])")
SCHEME = re.compile(r"(https?|ftp|mailto|xmpp)(?=:)", re.IGNORECASE)
WWW = re.compile(r"www(?=\.)", re.IGNORECASE)
ENTITY = re.compile(r"&(?=#?\w+;)")
PUNCTUATION = re.compile(r"\\(?=[!-/:-@\[-`{-~]|$)")
# What could begin emphasis, code or an image. A star or a tilde at the end of a figure is a mark and begins nothing.
EMPHASIS = re.compile(r"`|\*(?=\S)|(?<![^\W_])_|_(?![^\W_])|(?<![\w%])~(?=\S)|(?<=[\w%])~(?=[\w~])|!(?=\[)")
FORMULA = ("=", "+", "-", "@", "'")


class Ready(str):
    """Markdown that is finished: the templates leave it alone."""

    __slots__ = ()


def plain(text: str) -> str:
    """Return text as one line without invisible characters: for a terminal, a page or a plot.

    Line ends and tabs become spaces. A page escapes its own markup beyond that.
    """
    if text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in "\n\t":
        return " "
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()


def markdown(text: str) -> Ready:
    """Return text as one line of Markdown that shows it and does nothing: no link, image, HTML, table or emphasis.

    An e-mail address may still become a link on sites that look for them after all else.
    """
    text = PUNCTUATION.sub(r"\\\\", plain(text))
    text = ENTITY.sub("&amp;", text).replace("<", "&lt;")
    text = EMPHASIS.sub(r"\\\g<0>", text).replace("|", "\\|")
    parts, at = [], 0
    for found in FIGURES.finditer(text):
        parts += [_brackets(text[at : found.start()]), found.group()]
        at = found.end()
    text = "".join([*parts, _brackets(text[at:])])
    text = WWW.sub(r"\g<0>\\", SCHEME.sub(r"\g<0>\\", text))
    text = text.lstrip()
    if block := BLOCK.match(text):
        at = block.end() if block.group().isdigit() else 0
        text = f"{text[:at]}\\{text[at:]}"
    return Ready(text)


def _brackets(text: str) -> str:
    return text.replace("[", "\\[").replace("]", "\\]")


def markdown_code(text: str) -> Ready:
    """Return text as a code span of Markdown, with more backticks around it than it has in a row."""
    text = plain(text)
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return Ready(f"{fence}{space}{text}{space}{fence}")


def csv_cell(text: str) -> str:
    """Return text as a cell of a spreadsheet that is no formula: an apostrophe before it says that it is text."""
    text = plain(text)
    return f"'{text}" if text.lstrip().startswith(FORMULA) else text
