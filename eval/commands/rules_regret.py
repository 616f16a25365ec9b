"""Judge a rule table by a run of several families: rules regret."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooflane.dispatch import load_rules
from rooflane.eval.commands.output import AsJson, RulesFile, print_json, print_table

if TYPE_CHECKING:
    from rooflane.eval.stats.intervals import Interval


def regret_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run of several families beside each other.")],
    rules: RulesFile = None,
    as_json: AsJson = False,
) -> None:
    """Say how much longer the table's choices take than the best family measured, with an interval.

    The best family of a shape is chosen for each process on the other processes, so that noise is not taken for skill.
    """
    from rooflane.eval.stats.regret import regret
    from rooflane.eval.stats.run import open_run

    found = regret(open_run(run), load_rules(rules))
    if as_json:
        print_json(found.as_dict())
        return
    columns = ("id", "rule", "choice", "best of the others", "choice over best [95%]", "judged by itself")
    rows = [
        (row.shape, row.rule, row.choice, row.best, _ratio(row.regret), f"{row.apparent:.3g}x") for row in found.shapes
    ]
    print_table(
        f"regret of {found.rules}, run {found.run}", columns, rows, left=("rule", "choice", "best of the others")
    )
    for shape, reason in found.left_out.items():
        print(f"shape {shape}: left out, {reason}")
    over = f"over {len(found.shapes)} shapes"
    print(f"table over oracle: {_ratio(found.table)} {over}; {found.apparent:.3g}x with the oracle judged by itself")
    for family, ratio in sorted(found.singles.items(), key=lambda item: item[1].centre):
        print(f"{family} for all, over oracle: {_ratio(ratio)}")
    if found.single_over_table:
        print(f"best one family for all, over the table: {_ratio(found.single_over_table)}")
    else:
        print("no family was right and timed on all of these shapes, so none stands for all of them")


def _ratio(value: Interval) -> str:
    return f"{value.centre:.3g}x [{value.low:.3g}, {value.high:.3g}]"
