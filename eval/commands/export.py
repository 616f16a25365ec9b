"""Write a file of one's own: `rooflane new candidate` to start from, `rooflane export` to submit."""

from __future__ import annotations

import enum
import hashlib
import shlex
from pathlib import Path
from typing import Annotated

import typer

from rooflane.eval.commands.output import (
    AsJson,
    Group,
    ProfileName,
    RulesFile,
    find_profile,
    find_shapes,
    print_json,
    remark,
    say,
)
from rooflane.eval.commands.submit import DEFAULT_SHAPES
from rooflane.eval.exit_codes import EvaluationError

new_app = Group(no_args_is_help=True, help="Write a commented start for something of your own.")


class Style(enum.StrEnum):
    """What a candidate file defines."""

    BUILD = "build"
    CLASS = "class"


@new_app.callback()
def _group() -> None:
    """Keep `candidate` a word of its own while it is the only one."""


@new_app.command("candidate")
def candidate_command(
    out: Annotated[Path, typer.Option("--out", metavar="FILE.py", help="Where it goes; must not exist.")] = Path(
        "my_kernel.py"
    ),
    style: Annotated[
        Style, typer.Option(help="build(model, shape, device), or the organiser's UserOptimizedTransformer.")
    ] = Style.BUILD,
) -> None:
    """Write a candidate that runs as it is: a Triton kernel with a CPU path, correct, explained line by line."""
    from rooflane.eval.report.render import render

    if out.suffix != ".py":
        raise EvaluationError(f"{out}: a candidate is a Python file; give a name that ends in .py")
    text = render("candidate.py.j2", file=str(out), style=style.value)
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise EvaluationError(f"{out}: exists already and is left as it is; name another file with --out") from None
    say(f"{out} written; evaluate it with: rooflane eval published.csv --shape 2 --candidate {shlex.quote(str(out))}")


def export_command(
    file: Annotated[
        str, typer.Argument(metavar="SHAPES", help="Shape file; a shipped one by its bare name.")
    ] = DEFAULT_SHAPES,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path("my_submission.py"),
    profile: ProfileName = "auto",
    candidate: Annotated[str, typer.Option(help="dispatched, FAMILY or FAMILY:key=value,...")] = "dispatched",
    rules: RulesFile = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this shape; repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one Python file with the families SHAPES need; it runs without rooflane, with torch and triton alone.

    The file defines `UserOptimizedTransformer(config)`; `python FILE ORGANISER.py [flags]` runs the organiser's script
    with it, and `rooflane submit --candidate FILE` does so for a whole shape file.
    """
    from rooflane.eval.export.write import export, write_export
    from rooflane.eval.worker.candidates import load_rule_table, parse_candidate

    device = find_profile(profile)
    found = export(find_shapes(file, shape or ()), parse_candidate(candidate), device, load_rule_table(rules))
    write_export(found.text, out)
    if as_json:
        print_json(
            {
                "file": str(out),
                "sha256": hashlib.sha256(found.text.encode()).hexdigest(),
                "lines": found.text.count("\n"),
                "profile": device.name,
                "families": list(found.families),
                "shapes": {item.id: plan.family for item, plan in found.planned},
                "plain_torch": {item.id: reason for item, reason in found.plain},
            }
        )
    else:
        say(
            f"{out}: {len(found.planned)} shapes on {device.name} by {', '.join(found.families)}; "
            f"{found.text.count(chr(10)):,} lines"
        )
    for item, reason in found.plain:
        remark(f"shape {item.id} is left to plain torch: {reason}")
