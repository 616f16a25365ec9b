"""docs/models.md says of every model and block what the registry and a served model say."""

from __future__ import annotations

from pathlib import Path

from rooflane.dispatch import optimize, served
from rooflane.dispatch.adapters.known import ENCODER, REFUSED

TEXT = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
ACTIVATIONS = {"gelu": "GELU", "gelu_tanh": "tanh GELU", "quick_gelu": "quick GELU", "relu": "ReLU", "silu": "SiLU"}


def test_the_table_says_of_a_model_how_it_was_taken(case, request):
    name = request.node.callspec.params["case"]
    (stack,) = served(optimize(case.build().eval()))
    form = stack.stack.form
    words = ["pre-norm" if form.norm_first else "post-norm", ACTIVATIONS[form.activation]]
    assert stack.known is ENCODER or stack.known.form.startswith(", ".join(words))
    words += ["rotary positions"] * (form.rotary_theta is not None)
    library, _, _ = stack.block.partition(".")
    block = stack.block.rpartition(".")[2]
    assert f"\n| {name} | {library} | `{block}` | {', '.join(words)} | taken whole |\n" in TEXT


def test_the_tables_hold_nothing_else(models):
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith(("| model", "| block"))]
    refused = [f"| `{name.rpartition('.')[2]}` | {reason} |" for name, reason in REFUSED.items()]
    assert rows[-len(refused) :] == refused
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[: -len(refused)]] == list(models)
