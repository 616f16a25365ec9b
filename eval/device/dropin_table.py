"""The drop-in table, from the JSON lines of `rooflane.eval.device.dropin`.

`python -m rooflane.eval.device.dropin_table FILE` prints it; with a page behind, it is written between the
page's markers.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.report.report import _markdown as markdown
from rooflane.eval.report.report import update_between_markers
from rooflane.eval.report.tables import NONE, Table, interval, number
from rooflane.eval.stats.intervals import median_ns, paired_log_ratio, t_interval
from rooflane.shapes import Shape

OURS = "rooflane"
# PyTorch's own ways to run an encoder; "+" marks those that torch.compile makes.
OWN = {
    "fast path": "fast path",
    "fast path off": "SDPA",
    "fast path+compile": "compiled",
    "fast path+graphs": "compiled RO",
    "fast path off+compile": "SDPA compiled",
    "fast path off+graphs": "SDPA compiled RO",
}
Line = dict[str, Any]


def load_dropin(path: str | Path) -> dict[str, list[Line]]:
    """Return the lines of each shape, one a process; raises `EvaluationError` when there are none or one repeats."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path}: cannot be read as JSON lines of the drop-in measurement ({error})") from None
    shapes: dict[str, list[Line]] = {}
    for line in lines:
        rows = shapes.setdefault(line["shape"]["id"], [])
        if any(row["process"] == line["process"] for row in rows):
            raise EvaluationError(f"{path}: shape {line['shape']['id']} stands twice for process {line['process']}")
        rows.append(line)
    if not shapes:
        raise EvaluationError(f"{path}: holds no line; run python -m rooflane.eval.device.dropin first")
    return shapes


def render_dropin_table(path: str | Path) -> str:
    """Return the table in Markdown, the geometric means and the conditions under it."""
    shapes = load_dropin(path)
    whole = {key: lines for key, lines in shapes.items() if not any("error" in line for line in lines)}
    failures = [
        f"- shape {row['shape']['id']} failed: {row['error']}" for row in sum(shapes.values(), []) if "error" in row
    ]
    own = [name for name in OWN if any(_timed(row, name) for rows in whole.values() for row in rows)]
    columns = ("id", "shape", "family", *(OWN[name] for name in own), OURS, "over fast path", "over the fastest", "use")
    rows = tuple(_row(lines, own) for lines in whole.values())
    note = (
        "event time in ms, the median over the processes that timed the arm; SDPA: fast path off; RO: with CUDA "
        "graphs, whose next call overwrites the output; use: the largest share of the tolerance, above 1 fails"
    )
    environment = next(iter(shapes.values()))[0]["environment"]
    table = Table("", columns, rows, 3, note)
    lines = "\n".join([*_headlines(whole, own, list(shapes)), *failures])
    return "\n\n".join([markdown(table), lines, _conditions(environment, shapes)])


def _row(lines: list[Line], own: list[str]) -> tuple[str, ...]:
    """Return one shape's cells."""
    times = {name: _median_ms(lines, name) for name in (*own, OURS)}
    others = [name for name in own if times[name] is not None]
    fastest = min(others, key=lambda name: times[name])
    shape = Shape(**lines[0]["shape"])
    worst = max(_use(gate) for line in lines for gate in line["gates"].values())
    return (
        shape.id,
        shape.label(),
        lines[0]["family"],
        *(NONE if times[name] is None else number(times[name]) for name in own),
        number(times[OURS]),
        interval(t_interval(_logs(lines, "fast path"))),
        f"{interval(t_interval(_logs(lines, fastest)))} ({OWN[fastest]})",
        f"{number(worst)}{'' if worst <= 1 else ' !'}",
    )


def _headlines(shapes: dict[str, list[Line]], own: list[str], all_shapes: list[str]) -> list[str]:
    """Return the geometric mean over each arm, and of how many shapes ours was faster than every arm each time."""
    lines = []
    for name in own:
        rows = {key: rows for key, rows in shapes.items() if all(_timed(row, name) for row in rows)}
        processes = min((len(group) for group in rows.values()), default=0)
        if processes:
            logs = [fmean(_logs(group, name)[index] for group in rows.values()) for index in range(processes)]
            lines.append(f"- over {OWN[name]}: {interval(t_interval(logs))} over {_count(len(rows))}")
    ahead = [key for key, rows in shapes.items() if all(_ahead(row, own) for row in rows)]
    passed = [key for key, rows in shapes.items() if all(_passed(row) for row in rows)]
    lines.append(f"- faster than every arm timed in every process: {_share(ahead, all_shapes)}")
    lines.append(f"- passes the gate in every check: {_share(passed, all_shapes)}")
    return lines


def _share(those: list[str], all_shapes: list[str]) -> str:
    rest = [key for key in all_shapes if key not in those]
    return f"{len(those)} of {_count(len(all_shapes))}" + (f" (not {', '.join(rest)})" if rest else "")


def _count(shapes: int) -> str:
    return f"{shapes} shape{'' if shapes == 1 else 's'}"


def _conditions(environment: dict[str, Any], shapes: dict[str, list[Line]]) -> str:
    """Return the hardware, versions and counts on one line."""
    counts = sorted({len(rows) for rows in shapes.values()})
    facts = [
        environment.get("gpu") or environment["cpu"],
        *([f"driver {environment['driver']}"] if environment.get("driver") else []),
        *(f"{name} {environment[name]}" for name in ("torch", "triton", "python") if environment.get(name)),
        f"commit {(environment['commit'] or 'unknown')[:12]}",
        f"{'-'.join(map(str, counts))} {'process' if counts == [1] else 'processes'}",
        "4 mirrored rounds, fresh inputs",
    ]
    return "; ".join(facts) + "."


def _timed(line: Line, name: str) -> bool:
    return bool(line["arms"].get(name, {}).get("event_ns"))


def _line_ms(line: Line, name: str) -> float:
    return median_ns([sample for part in line["arms"][name]["event_ns"] for sample in part]) / 1e6


def _median_ms(lines: list[Line], name: str) -> float | None:
    """Return the median over processes of an arm's median, None where no process timed it."""
    found = [_line_ms(line, name) for line in lines if _timed(line, name)]
    return median(found) if found else None


def _logs(lines: list[Line], name: str) -> list[float]:
    """Return log(time of an arm / ours) of each process that timed the arm."""
    arms = [line["arms"] for line in lines if _timed(line, name)]
    return [paired_log_ratio(found[name]["event_ns"], found[OURS]["event_ns"]) for found in arms]


def _ahead(line: Line, own: list[str]) -> bool:
    return all(_line_ms(line, OURS) < _line_ms(line, name) for name in own if _timed(line, name))


def _passed(line: Line) -> bool:
    return all(gate["passed"] and _use(gate) <= 1 for gate in line["gates"].values())


def _use(gate: dict[str, Any]) -> float:
    """Return the use of tolerance; what is not a number in JSON was infinite."""
    use = gate["use"]
    return use if isinstance(use, (int, float)) else math.inf


def main() -> int:
    """Print the table, or write it between a page's markers."""
    if len(sys.argv) not in (2, 3):
        print("usage: python -m rooflane.eval.device.dropin_table FILE [PAGE]", file=sys.stderr)
        return 2
    text = render_dropin_table(sys.argv[1])
    if len(sys.argv) == 2:
        print(text)
    else:
        changed = update_between_markers(sys.argv[2], "dropin", text)
        print(f"{sys.argv[2]}: {'written' if changed else 'already says so'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
