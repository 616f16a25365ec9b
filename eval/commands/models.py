"""Which models optimize() takes whole: the block classes it knows, and what it would serve of a given model."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooflane.dispatch import Profile
from rooflane.dispatch.adapters.known import ENCODER, KNOWN, REFUSED
from rooflane.dispatch.units import duration
from rooflane.eval.commands.output import (
    AsJson,
    ProfileName,
    RulesFile,
    console,
    find_problems,
    find_profile,
    print_json,
    say,
)
from rooflane.eval.report.table import Table, print_table
from rooflane.families import load_families

if TYPE_CHECKING:
    from rooflane.dispatch.dispatched import Dispatched
    from rooflane.shapes import Problem

COLUMNS = ("stack", "blocks", "form", "call", "family", "kernel")


def models_command(
    problem: Annotated[
        str | None, typer.Option(metavar="FILE.py", help="Say what would be served of this problem's Model.")
    ] = None,
    profile: ProfileName = "auto",
    rules: RulesFile = None,
    as_json: AsJson = False,
) -> None:
    """List the models that optimize() takes whole, by the class of their blocks, and those it refuses by name.

    With --problem, run the file's Model once and show which family and kernel serve each stack of blocks, and why the
    rest runs its own code. Exit 2 when nothing would be served.
    """
    if problem is None:
        _list(as_json)
        return
    device = find_profile(profile)
    found = [_inspect(one, device, rules) for one in find_problems(problem)]
    if as_json:
        print_json(found)
        return
    for one in found:
        title = f"{one['problem']} on {device.title}"
        rows = [(*(row[name] for name in COLUMNS), duration(row["predicted_s"])) for row in one["served"]]
        table = Table(title, (*COLUMNS, "predicted"), rows, len(COLUMNS), optional=("kernel", "call"))
        print_table(table, console())
        say(*one["remarks"])


def _list(as_json: bool) -> None:
    taken = [
        {"models": one.label, "library": one.library, "class": one.name, "form": one.form} for one in (*KNOWN, ENCODER)
    ]
    refused = [{"class": name, "reason": reason} for name, reason in REFUSED.items()]
    if as_json:
        print_json({"taken": taken, "refused": refused})
        return
    cells = [(row["models"], row["library"], _short(row["class"]), row["form"]) for row in taken]
    columns = ("models", "library", "class", "form")
    print_table(Table("Blocks that optimize(model) serves in place", columns, cells, 4), console())
    say(*(f"not served: {_short(row['class'])} {row['reason']}" for row in refused))


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _inspect(problem: Problem, profile: Profile, rules: str | None) -> dict[str, Any]:
    """Return what is served of a problem's Model in one call of its own, and what optimize() warned of."""
    import torch

    from rooflane.dispatch import optimize, served
    from rooflane.eval.worker.problem import build_model, draw_inputs

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, inputs = build_model(problem, device, 0), draw_inputs(problem, device, 0)
    with torch.inference_mode(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fast = optimize(model, rules=rules)
        fast(*inputs)
    if fast is model:
        stacks = [(one.path, _short(one.block), one.stack) for one in served(model) if one.stack is not None]
    else:
        stacks = [("the model", type(model).__name__, fast)]
    rows = [row for stack in stacks for row in _rows(*stack, profile)]
    remarks = dict.fromkeys(str(one.message) for one in said if one.category is UserWarning)
    return {"problem": problem.id, "served": rows, "remarks": list(remarks)}


def _rows(path: str, block: str, stack: Dispatched, profile: Profile) -> list[dict[str, Any]]:
    families = load_families()
    rows = []
    for chosen in stack.routes_on(profile):
        family = families[chosen.family]
        kernels = family.explain(chosen.shape, profile)
        rows.append(
            {
                "stack": path,
                "blocks": f"{chosen.shape.num_layers} x {block}",
                "form": ", ".join(stack.form.differences()) or "as published",
                "call": chosen.shape.label(),
                "family": chosen.family,
                "kernel": kernels[-1] if kernels else family.summary,
                "predicted_s": chosen.predicted_s,
            }
        )
    return rows
