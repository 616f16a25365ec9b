"""The submitted class of an exported file, its table of shapes, and the run of the organiser's script."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooflane.baseline.reference import BaselineTransformer
from rooflane.eval.submit.organiser import run_with_class
from rooflane.eval.submit.placed import PlacedTransformer
from rooflane.shapes.shape import Shape

# (batch_size, seq_len, d_model, num_heads, ffn_dim, num_layers, causal, dtype): (family, options, device types).
PLANS: dict[tuple[Any, ...], tuple[Any, dict[str, Any], tuple[str, ...]]] = {}


class UserOptimizedTransformer(PlacedTransformer):
    """The submitted model: the planned family for the shapes of `PLANS`, plain torch for any other."""

    def choose(self, plain: BaselineTransformer, shape: Shape, device: torch.device) -> Callable[..., Tensor] | None:
        """Return the planned forward for a shape, or None where there is none on this kind of device."""
        sizes = (shape.batch_size, shape.seq_len, shape.d_model, shape.num_heads, shape.ffn_dim, shape.num_layers)
        family, options, kinds = PLANS.get((*sizes, shape.causal, shape.dtype), (None, {}, ()))
        return family.build(plain, shape, device, **options) if device.type in kinds else None


def run() -> None:
    """Run the organiser's script, given with its flags on the command line, with the class above in its place."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(f"usage: python {Path(sys.argv[0]).name} ORGANISER.py [the script's own flags]")
    path = Path(sys.argv[1])
    try:
        source = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"{path}: cannot be read ({error}); give the path of the organiser's script")
    if "UserOptimizedTransformer" not in source or "__main__" not in source:
        sys.exit(f"{path}: has no UserOptimizedTransformer and guarded end to run; give the organiser's own script")
    run_with_class(path, sys.argv[2:], lambda module: UserOptimizedTransformer)
