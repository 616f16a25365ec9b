"""What is wrong with a rule table: one finding for each fault, with its file and line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from rooflane.dispatch.allowed import Allowed
from rooflane.dispatch.conditions import FIELDS
from rooflane.dispatch.rules import Rule
from rooflane.dispatch.toml_source import complaints
from rooflane.families import FamilySpec, registry
from rooflane.families.option_values import option_fault

if TYPE_CHECKING:
    from rooflane.dispatch.rules import RuleTable

Severity = Literal["error", "warning"]
CATCH_ALL = "a row with `when = {}` as the last one"
# What is left of a row behind many others may fall into many parts; past this it is taken to be reachable.
MOST_PARTS = 500


@dataclass(frozen=True)
class LintFinding:
    """One thing wrong with a row; an error makes the table unusable, a warning marks a row that may never act."""

    kind: str
    severity: Severity
    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def lint(table: RuleTable) -> list[LintFinding]:
    """Return what is wrong with a table, in the order of its rows, one finding a fault.

    Errors: malformed, duplicate-name, unknown-family, unknown-option, bad-option, missing-catch-all. Warnings:
    impossible (conditions contradict each other), unreachable (behind a row that matches everything), shadowed
    (wherever the row matches, earlier ones do): such a row acts only where an earlier row's family refuses the shape;
    overlap (two rows share a part neither is meant to hold); hides-ours (the user's rows match everything). Rows are
    held against those of their own file: that a row of the user's goes before ours is what it is for.
    """
    findings = list(table.faults)
    families = registry.load_families()
    for first, last in table.layers():
        sound: list[tuple[Rule, int]] = []
        for index in range(first, last):
            rule = table.rules[index]
            # Of a row in error the errors alone are told, and it hides no other: it may not stay as it is.
            wrong = list(_row_errors(rule, table.rules[first:index], families))
            for kind, severity, message in wrong or _row_warnings(rule, sound):
                text = f"rule {rule.name!r} {message}"
                findings.append(LintFinding(kind, severity, rule.name, table.where(index), text))
            if not wrong:
                sound.append((rule, table.lines[index]))
    findings += _check_end(table)
    return sorted(findings, key=lambda finding: _position(finding, table))


def read_row(row: dict[str, Any], where: Callable[[str], str]) -> tuple[Rule | None, list[LintFinding]]:
    """Return the row as a rule, or None and what is wrong with it; `where` tells the file and line of a key's path."""
    try:
        return Rule.model_validate(row), []
    except ValidationError as error:
        found = {".".join(map(str, place)): sentence for place, sentence in complaints(error)}
    named = row["name"] if isinstance(row.get("name"), str) else ""
    subject = f"rule {named!r}" if named else "an unnamed rule"
    # A key with a slip in it is unknown and missing at once: that is one fault.
    for key in [key for key in row if key not in Rule.model_fields]:
        meant = _closest(key, [name for name in Rule.model_fields if name not in row])
        if meant:
            found.pop(meant, None)
        found[key] = f"no key has this name{f', did you mean {meant!r}?' if meant else ''}"
    keys = ", ".join(Rule.model_fields)
    return None, [
        LintFinding("malformed", "error", named, where(place), f"{subject}: {place}: {sentence}; a row has {keys}")
        for place, sentence in found.items()
    ]


def _row_warnings(rule: Rule, earlier: Sequence[tuple[Rule, int]]) -> Iterator[tuple[str, Severity, str]]:
    """Yield what may be wrong with a row behind others, given with their lines, as (kind, severity, sentence's end)."""
    if rule.impossible:
        yield "impossible", "warning", f"can never match: what it asks of {rule.impossible} contradicts itself"
    elif hidden := _hidden(rule, [other for other, _ in earlier]):
        yield hidden
    else:
        for other, line in earlier:
            if part := _accident(other, rule):
                place = " and ".join(f"{name} {allowed}" for name, allowed in part.items())
                yield (
                    "overlap",
                    "warning",
                    f"overlaps {other.name!r} (line {line}): where {place} both match, and {other.name!r} sends the "
                    f"shape to {other.family}; move a bound, or give that part a row of its own",
                )


def _row_errors(
    rule: Rule, earlier: Sequence[Rule], families: dict[str, FamilySpec]
) -> Iterator[tuple[str, Severity, str]]:
    if any(rule.name == other.name for other in earlier):
        yield "duplicate-name", "error", "has the name of an earlier row; give it its own"
    if rule.family not in families:
        meant = _closest(rule.family, families)
        hint = f", did you mean {meant!r}?" if meant else ";"
        yield "unknown-family", "error", f"names the unknown family {rule.family!r}{hint} there are: {_names(families)}"
        return
    known = families[rule.family].options
    for option in rule.options.keys() - known.keys():
        takes = _names(known) or "no option"
        yield "unknown-option", "error", f"sets the unknown option {option!r}; {rule.family} takes: {takes}"
    for option, value in rule.options.items():
        if wanted := option_fault(families[rule.family], option, value):
            yield "bad-option", "error", f"sets {option} to {value!r}; it must be {wanted}"


def _hidden(rule: Rule, earlier: Sequence[Rule]) -> tuple[str, Severity, str] | None:
    """Return the finding for a row that matches only where earlier ones do, or None."""
    cover = next((other for other in earlier if other.covers(rule)), None)
    if cover is not None:
        same = (cover.family, cover.options) == (rule.family, rule.options)
        effect = "it can be removed" if same else f"it acts only where {cover.family} refuses the shape"
        if cover.catches_all:
            return "unreachable", "warning", f"stands behind {cover.name!r}, which matches everything: {effect}"
        return "shadowed", "warning", f"matches only where {cover.name!r} already does: {effect}"
    # A last row for everything is asked for even where the rows before it leave nothing: it is where refusals end.
    if rule.catches_all or parts_left(rule, earlier):
        return None
    names = " and ".join(repr(other.name) for other in earlier if _meets(other, rule))
    return "shadowed", "warning", f"matches only where {names} together already do; it acts where their families refuse"


def parts_left(rule: Rule, earlier: Iterable[Rule]) -> bool:
    """Return whether the row matches anything that no earlier row matches.

    Fields count as independent: a False is always right, a True may rest on values that never occur together.
    """
    parts = [dict(rule.conditions)]
    for other in earlier:
        parts = [piece for part in parts for piece in _without(part, other)]
        if not parts:
            return False
        if len(parts) > MOST_PARTS:
            return True
    return True


def _without(part: dict[str, Allowed], rule: Rule) -> Iterator[dict[str, Allowed]]:
    """Yield what a rule leaves of a part, in pieces that do not meet."""
    inside = dict(part)
    for name, allowed in rule.conditions.items():
        mine = inside.get(name, FIELDS[name].domain)
        outside = mine.without(allowed)
        if not outside.empty:
            yield inside | {name: outside}
        inside[name] = mine.common(allowed)
        if inside[name].empty:
            return


def _meets(first: Rule, second: Rule) -> bool:
    names = first.conditions.keys() | second.conditions.keys()
    return not any(first.allows(name).common(second.allows(name)).empty for name in names)


def _accident(earlier: Rule, later: Rule) -> dict[str, Allowed] | None:
    """Return the part two rows share by the look of it unmeant, or None.

    Rows of a ladder may meet: each asks another question, or the later one holds the earlier. Two that ask about the
    same fields and share a part, or whose bounds meet in one value, look like a slip.
    """
    same_result = (earlier.family, earlier.options) == (later.family, later.options)
    if same_result or later.covers(earlier) or earlier.impossible or not _meets(earlier, later):
        return None
    shared = [name for name in earlier.conditions if name in later.conditions]
    common = {name: earlier.allows(name).common(later.allows(name)) for name in shared}
    if earlier.conditions.keys() == later.conditions.keys():
        return {name: part for name, part in common.items() if not (part.covers(FIELDS[name].domain))}
    touching = {name: part for name, part in common.items() if _touches(earlier.allows(name), later.allows(name), part)}
    return touching or None


def _touches(first: Allowed, second: Allowed, common: Allowed) -> bool:
    """Return whether two spans share one value alone, the end of both."""
    if not (len(first.spans) == len(second.spans) == len(common.spans) == 1):
        return False
    point, ends = common.spans[0], (first.spans[0], second.spans[0])
    return point.low[0] == point.high[0] and not any(span.low == span.high for span in ends)


def _check_end(table: RuleTable) -> Iterator[LintFinding]:
    """Yield a missing catch-all, or that the user's rows leave none of ours in use."""
    layers = table.layers()
    if len(layers) == 2:
        first, last = layers[0]
        for index in range(first, last):
            everything = Rule.model_construct(name="", when={}, family="", options={}, because="")
            if not parts_left(everything, table.rules[first : index + 1]):
                message = (
                    f"rule {table.rules[index].name!r} leaves no shape to the {len(table.rules) - last} shipped rules "
                    "behind it: they act only where its family refuses; say `replace = true` on top if that is meant"
                )
                yield LintFinding("hides-ours", "warning", table.rules[index].name, table.where(index), message)
                return
        return
    unread = {fault.where for fault in table.faults}
    ends_unread = any(int(where.rpartition(":")[2]) > max(table.lines, default=0) for where in unread)
    if ends_unread or (table.rules and table.rules[-1].catches_all):
        return
    name = table.rules[-1].name if table.rules else ""
    where = table.where(len(table.rules) - 1) if table.rules else f"{table.path}:1"
    message = f"the table ends without a catch-all, so some shapes would find no rule; add {CATCH_ALL}"
    yield LintFinding("missing-catch-all", "error", name, where, message)


def _position(finding: LintFinding, table: RuleTable) -> tuple[bool, int, bool]:
    """Return where a finding belongs in the list: the user's file first, by line, the end's last."""
    file, _, line = finding.where.rpartition(":")
    return file != str(table.path), int(line), finding.kind in ("missing-catch-all", "hides-ours")


def _closest(name: str, known: Iterable[str]) -> str | None:
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, list(known), n=1)), None)


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
