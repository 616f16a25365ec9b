"""Reading the TOML that users write, so that every complaint names file and line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

DECODE_POSITION = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


def read_toml(path: Path, error: type[ValueError]) -> tuple[dict[str, Any], str]:
    """Return the parsed document and its text; raises `error` naming the file and, for bad TOML, the line."""
    text = read_text(path, error)
    return parse_toml(text, path, error), text


def read_text(path: Path, error: type[ValueError]) -> str:
    """Return a file's text; raises `error` naming the file when there is none to read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error(f"{path}: no such file; check the path") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"{path}: cannot be read ({problem}); it must be a UTF-8 TOML file") from None


def parse_toml(text: str, path: Path, error: type[ValueError]) -> dict[str, Any]:
    """Return the document a text holds; raises `error` naming the file and line of what is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        message = str(problem)
        position = DECODE_POSITION.search(message)
        last = max(1, len(text.splitlines()))
        line = int(position.group(1)) if position and position.group(1) else last
        reason = DECODE_POSITION.sub("", message)
        raise error(f"{path}:{line}: not valid TOML: {reason}; correct that line") from None


def header_lines(text: str, header: str) -> list[int]:
    """Return the line numbers, from 1, on which a table header such as `[copy]` or `[[rule]]` stands."""
    opening, name = header[: -len(header.lstrip("["))], header.strip("[]")
    closing = "]" * len(opening)
    pattern = re.compile(rf"\s*{re.escape(opening)}\s*{re.escape(name)}\s*{closing}\s*(#.*)?")
    return [number for number, line in enumerate(text.splitlines(), 1) if pattern.fullmatch(line)]


def key_line(text: str, header: int, path: str) -> int:
    """Return the line of a key such as `when.seq_len` in the table headed on line `header`; that one if it has none."""
    lines = text.splitlines()
    following = (number for number in range(header, len(lines)) if lines[number].lstrip().startswith("["))
    block = range(header, next(following, len(lines)))
    for key in reversed(path.split(".")):
        pattern = re.compile(rf"""(^|[\s{{,.])["']?{re.escape(key)}["']?\s*=""")
        for number in block:
            if pattern.search(lines[number].partition("#")[0]):
                return number + 1
    return header


def complaints(error: ValidationError) -> list[tuple[tuple[str | int, ...], str]]:
    """Return pydantic's findings as (place, sentence), without its own prefixes."""
    return [(item["loc"], item["msg"].removeprefix("Value error, ")) for item in error.errors()]
