"""Which models optimize() takes whole: the block classes it knows, and what it would serve of a given model."""

from __future__ import annotations

from rooflane.dispatch.adapters.known import KNOWN, REFUSED
from rooflane.eval.commands.output import AsJson, console, print_json, say
from rooflane.eval.report.table import Table, print_table

# Read by an adapter of its own.
OF_TORCH = {
    "models": "nn.TransformerEncoder",
    "library": "torch",
    "class": "torch.nn.TransformerEncoder",
    "form": "post- or pre-norm",
}


def models_command(as_json: AsJson = False) -> None:
    """List the models that optimize() takes whole, by the class of their blocks, and those it refuses by name."""
    taken = [
        OF_TORCH,
        *({"models": one.label, "library": one.library, "class": one.name, "form": one.form} for one in KNOWN),
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
