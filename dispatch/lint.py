"""Faults of a rule table: one finding for each fault, with its file and line."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import product
from typing import Any

from pydantic import ValidationError

from rooflane.dispatch.rules import FIELDS, Condition, LintFinding, Rule, RuleTable, corner_values, parse_condition
from rooflane.dispatch.toml_source import complaints
from rooflane.families import FamilySpec, registry
from rooflane.families.spec import option_fault

CATCH_ALL = "a row with `when = {}` as the last one"
# Up to this many cases are tried one by one; of more, this many are drawn with a fixed seed.
MOST_CASES = 4096
SEED = 0


def lint(table: RuleTable, warnings: bool = True) -> list[LintFinding]:
    """Return the faults of a table in the order of its rows, one finding each; without `warnings`, the errors alone.

    Errors: malformed, duplicate-name, unknown-family, unknown-option, bad-option, missing-catch-all. Warnings:
    impossible (the conditions contradict each other), unreachable (after a row that matches everything), shadowed
    (earlier rows match wherever this one does, so it acts only where their families refuse), overlap (two rows share
    cases by accident), hides-shipped (the user's rows match everything). Each file's rows are compared with rows of the
    same file: the user's rows are meant to act before the shipped ones.

    Rows are compared on cases built from the values they state, the neighbours of these values and the ends of each
    field. Fields vary independently, so a case may combine values that no shape has.
    """
    findings = list(table.faults)
    families = registry.load_families()
    for first, last in table.layers():
        sound: list[tuple[Rule, int]] = []
        for index in range(first, last):
            rule = table.rules[index]
            # A row in error has to change, so it gets no warning and hides no other row.
            wrong = list(_row_errors(rule, table.rules[first:index], families))
            for kind, message in wrong or (_row_warnings(rule, sound) if warnings else ()):
                text = f"rule {rule.name!r} {message}"
                findings.append(LintFinding(kind, rule.name, table.where(index), text))
            if not wrong:
                sound.append((rule, table.lines[index]))
    findings += _missing_end(table)
    if warnings:
        findings += _hidden_shipped(table)
    return sorted(findings, key=lambda finding: _position(finding, table))


def read_row(row: dict[str, Any], where: Callable[[str], str]) -> tuple[Rule | None, list[LintFinding]]:
    """Return the row as a rule, or None and all its faults; `where` returns the file and line of a key's path."""
    try:
        return Rule.model_validate(row), []
    except ValidationError as error:
        found = {".".join(map(str, place)): sentence for place, sentence in complaints(error)}
    name, when, family, options = (row.get(key) for key in ("name", "when", "family", "options"))
    name = name if isinstance(name, str) else ""
    subject = f"rule {name!r}" if name else "an unnamed rule"
    if isinstance(when, dict) and found.pop("when", None):
        found |= {f"when.{field}": fault for field, fault in _condition_faults(when)}
    # A misspelt key is unknown and missing at once: that is one fault.
    for key in [key for key in row if key not in Rule.model_fields]:
        meant = _closest(key, [field for field in Rule.model_fields if field not in row])
        if meant:
            found.pop(meant, None)
        found[key] = f"no key has this name{f', did you mean {meant!r}?' if meant else ''}"
    keys = f"; a row has {', '.join(Rule.model_fields)}"
    faults = [
        LintFinding(
            "malformed",
            name,
            where(place),
            f"{subject}: {place.partition('.')[0]}: {sentence}{'' if place.startswith('when.') else keys}",
        )
        for place, sentence in found.items()
    ]
    if isinstance(family, str) and family:
        known = registry.load_families()
        for kind, message in _family_errors(family, options if isinstance(options, dict) else {}, known):
            faults.append(LintFinding(kind, name, where("family"), f"{subject} {message}"))
    return None, faults


def _condition_faults(when: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for field, raw in when.items():
        try:
            parse_condition(field, raw)
        except ValueError as error:
            yield field, str(error)


def _row_errors(rule: Rule, earlier: Sequence[Rule], families: dict[str, FamilySpec]) -> Iterator[tuple[str, str]]:
    if any(rule.name == other.name for other in earlier):
        yield "duplicate-name", "has the name of an earlier row; give it its own"
    yield from _family_errors(rule.family, rule.options, families)


def _family_errors(family: str, options: dict[str, Any], families: dict[str, FamilySpec]) -> Iterator[tuple[str, str]]:
    if family not in families:
        meant = _closest(family, families)
        hint = f", did you mean {meant!r}?" if meant else ";"
        yield "unknown-family", f"names the unknown family {family!r}{hint} there are: {_names(families)}"
        return
    known = families[family].options
    for option in options.keys() - known.keys():
        takes = _names(known) or "no option"
        yield "unknown-option", f"sets the unknown option {option!r}; {family} takes: {takes}"
    for option, value in options.items():
        if wanted := option_fault(families[family], option, value):
            yield "bad-option", f"sets {option} to {value!r}; it must be {wanted}"


def _row_warnings(rule: Rule, earlier: Sequence[tuple[Rule, int]]) -> Iterator[tuple[str, str]]:
    """Yield the warnings of a row after others, given with their lines, as (kind, end of the sentence)."""
    if rule.impossible:
        yield "impossible", f"can never match: its conditions on {rule.impossible} contradict each other"
    elif hidden := _hidden(rule, [other for other, _ in earlier]):
        yield hidden
    else:
        for other, line in earlier:
            if shared := _accident(other, rule):
                example = " and ".join(f"{name} = {_text(value)}" for name, value in shared.items())
                yield (
                    "overlap",
                    f"overlaps {other.name!r} (line {line}): both match where, for example, {example}, and "
                    f"{other.name!r} sends the shape to {other.family}; move a bound, or give that part its own row",
                )


def _hidden(rule: Rule, earlier: Sequence[Rule]) -> tuple[str, str] | None:
    """Return the finding for a row that matches only where earlier ones do, or None."""
    cover = next((other for other in earlier if _covers(other, rule)), None)
    if cover is not None:
        same = (cover.family, cover.options) == (rule.family, rule.options)
        effect = "it can be removed" if same else f"it acts only where {cover.family} refuses the shape"
        if cover.catches_all:
            return "unreachable", f"comes after {cover.name!r}, which matches everything: {effect}"
        return "shadowed", f"matches only where {cover.name!r} already does: {effect}"
    # The last row for everything is required even where earlier rows leave no shape: refused shapes end there.
    if rule.catches_all or acts(rule, earlier):
        return None
    names = " and ".join(repr(other.name) for other in earlier if _shared_values(other, rule) is not None)
    return "shadowed", f"matches only where {names} together do; it acts where their families refuse"


def acts(rule: Rule, earlier: Sequence[Rule]) -> bool:
    """Return whether some case matches the row and no earlier one.

    With more than `MOST_CASES` combinations only a sample is tried, and a row that acts in a rare one may get False.
    """
    rules = (rule, *(other for other in earlier if _shared_values(other, rule) is not None))
    conditions: dict[str, list[Condition]] = {}
    for name in dict.fromkeys(name for one in rules for name in one.conditions):
        conditions[name] = [one.conditions[name] for one in rules if name in one.conditions]
    pools = {name: _cells(name, asked) for name, asked in conditions.items()}
    for name, condition in rule.conditions.items():
        pools[name] = tuple(filter(condition.holds, pools[name]))
    return any(all(other.mismatch(case) for other in rules[1:]) for case in _cases(pools))


def _cells(name: str, conditions: Sequence[Condition]) -> tuple[Any, ...]:
    """Return one value of a field for each combination of results that the conditions give."""
    found: dict[tuple[bool, ...], Any] = {}
    for value in corner_values(name, conditions):
        found.setdefault(tuple(condition.holds(value) for condition in conditions), value)
    return tuple(found.values())


def _cases(pools: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the fields' values, or a sample of too many."""
    if math.prod(map(len, pools.values())) <= MOST_CASES:
        for values in product(*pools.values()):
            yield dict(zip(pools, values, strict=True))
        return
    draw = random.Random(SEED)
    for _ in range(MOST_CASES):
        yield {name: draw.choice(pool) for name, pool in pools.items()}


def _covers(wide: Rule, narrow: Rule) -> bool:
    """Return whether one row matches wherever the other does, compared field by field."""
    for name, condition in wide.conditions.items():
        other = narrow.conditions.get(name)
        values = corner_values(name, [condition] if other is None else [condition, other])
        if not all(condition.holds(value) for value in values if other is None or other.holds(value)):
            return False
    return True


def _shared_values(first: Rule, second: Rule) -> dict[str, list[Any]] | None:
    shared = {}
    for name in first.conditions.keys() & second.conditions.keys():
        asked = (first.conditions[name], second.conditions[name])
        shared[name] = [value for value in corner_values(name, asked) if all(one.holds(value) for one in asked)]
        if not shared[name]:
            return None
    return shared


def _accident(earlier: Rule, later: Rule) -> dict[str, Any] | None:
    """Return an example of what two rows seem to share by accident, as values by field, or None.

    Rows of a ladder may overlap: each names another field, or the later row holds the earlier one. Two rows on the
    same fields that overlap in part, or whose bounds meet in one value, look like a mistake.
    """
    same_result = (earlier.family, earlier.options) == (later.family, later.options)
    if same_result or earlier.impossible or _covers(later, earlier):
        return None
    shared = _shared_values(earlier, later)
    if shared is None:
        return None
    named = [name for name in earlier.conditions if name in shared]
    if earlier.conditions.keys() == later.conditions.keys():
        limited = [name for name in named if set(shared[name]) != set(_all_values(name, earlier, later))]
        return {name: shared[name][0] for name in limited}
    return {name: shared[name][0] for name in named if _touch(name, earlier, later, shared[name])} or None


def _all_values(name: str, first: Rule, second: Rule) -> tuple[Any, ...]:
    return corner_values(name, (first.conditions[name], second.conditions[name]))


def _touch(name: str, first: Rule, second: Rule, shared: Sequence[Any]) -> bool:
    """Return whether two ranges have one number in common, the end of both."""
    both = (first.conditions[name], second.conditions[name])
    if len(shared) != 1 or not FIELDS[name].numeric or any(condition.values for condition in both):
        return False
    # One corner value can stand for an interval of real numbers; a bound of both is a single point.
    if FIELDS[name].kind is float and not all(shared[0] in condition.stated for condition in both):
        return False
    return all(sum(map(condition.holds, _all_values(name, first, second))) > 1 for condition in both)


def _missing_end(table: RuleTable) -> Iterator[LintFinding]:
    if len(table.layers()) == 2:
        return
    unread = {fault.where for fault in table.faults}
    ends_unread = any(int(where.rpartition(":")[2]) > max(table.lines, default=0) for where in unread)
    if ends_unread or (table.rules and table.rules[-1].catches_all):
        return
    name = table.rules[-1].name if table.rules else ""
    where = table.where(len(table.rules) - 1) if table.rules else f"{table.path}:1"
    message = f"the table ends without a catch-all, so some shapes would find no rule; add {CATCH_ALL}"
    yield LintFinding("missing-catch-all", name, where, message)


def _hidden_shipped(table: RuleTable) -> Iterator[LintFinding]:
    """Yield that the user's rows leave no shape to the shipped ones."""
    layers = table.layers()
    if len(layers) < 2:
        return
    first, last = layers[0]
    everything = Rule.model_construct(name="", when={}, family="", options={}, because="")
    for index in range(first, last):
        if not acts(everything, table.rules[first : index + 1]):
            message = (
                f"rule {table.rules[index].name!r} leaves no shape to the {len(table.rules) - last} shipped rules "
                "after it: they act only where its family refuses; write `replace = true` at the top if that is meant"
            )
            yield LintFinding("hides-shipped", table.rules[index].name, table.where(index), message)
            return


def _position(finding: LintFinding, table: RuleTable) -> tuple[bool, int, bool]:
    """Return where a finding belongs in the list: the user's file first, by line, the end's last."""
    file, _, line = finding.where.rpartition(":")
    return file != str(table.path), int(line), finding.kind in ("missing-catch-all", "hides-shipped")


def _closest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(name, list(known), n=1)), None)


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
