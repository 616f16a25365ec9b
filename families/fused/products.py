"""The products of a fused layer. No torch."""

from __future__ import annotations

from rooflane.families.ladder.gemm.tensor import PersistentRung, persistent

COLUMNS = 128


def _product(name: str, **more: bool | str) -> PersistentRung:
    return persistent(f"fused {name}", COLUMNS, "", 0.0, "", pingpong=True, bias=True, **more)


# A norm, then q, k and v; a residual and the sums of the next norm; a norm and each activation that a form may have.
QKV = _product("norm", norm=True)
RESIDUAL = _product("residual", residual=True, row_sums=True)
HIDDEN = {
    name: _product(f"norm {activation}", norm=True, activation=activation)
    for name, activation in (("gelu", "gelu"), ("gelu_tanh", "gelu tanh"), ("relu", "relu"))
}
PRODUCTS = (QKV, RESIDUAL, *HIDDEN.values())


def moment_tiles(width: int) -> int:
    """Return the parts in which a residual product gives the moments of a row."""
    return -(-width // COLUMNS)
