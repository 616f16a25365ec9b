"""Start something of one's own: `rooflane new candidate`."""

from __future__ import annotations

import enum
import shlex
from pathlib import Path
from typing import Annotated

import typer

from rooflane.eval.commands.group import Group
from rooflane.eval.exit_codes import EvaluationError

app = Group(no_args_is_help=True, help="Write a commented start for something of your own.")


class Style(enum.StrEnum):
    """What a candidate file defines."""

    BUILD = "build"
    CLASS = "class"


@app.callback()
def _group() -> None:
    """Keep `candidate` a word of its own while it is the only one."""


@app.command("candidate")
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
    print(f"{out} written; evaluate it with: rooflane eval published.csv --shape 2 --candidate {shlex.quote(str(out))}")
