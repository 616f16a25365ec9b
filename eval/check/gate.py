"""The gate: the one tolerance for every output, and how much of it an output uses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rooflane.eval.record.records import BIN_EDGES, TILE, GateResult

if TYPE_CHECKING:
    from torch import Tensor

ATOL = 0.002
RTOL = 0.02

# Elements compared at a time: bounds the temporaries to about 10 x 64 MB, whatever the output's size.
CHUNK_ELEMENTS = 1 << 24


def check_gate(out: Tensor, ref: Tensor, atol: float = ATOL, rtol: float = RTOL, *, spread: bool = False) -> GateResult:
    """Compare an output with its reference element by element.

    An element passes when both values are finite and `|out - ref| <= atol` or `|out - ref| <= rtol |ref|`, both
    inclusive; a different shape or kind of number fails every element. Errors are taken in float32, in float64 if
    either side is float64 or an integer. The element named worst is one that fails, where any does.
    `spread` adds the root mean square error and the histogram of the use of tolerance.
    """
    import torch

    names = {"dtype": str(out.dtype).removeprefix("torch."), "device": str(out.device)}
    wrong = _incomparable(out, ref)
    if wrong:
        names |= dict.fromkeys(("max_abs", "max_rel", "use"), math.inf)
        return GateResult(passed=False, total=ref.numel(), failed=ref.numel(), reason=wrong, **names)
    width = ref.shape[-1] if ref.dim() else 1
    out_rows, ref_rows = out.reshape(-1, width), ref.reshape(-1, width)
    exact = torch.float64 in (out.dtype, ref.dtype) or not ref.is_floating_point()
    wide = torch.float64 if exact else torch.float32
    step = max(TILE, CHUNK_ELEMENTS // width // TILE * TILE)
    failed, max_abs, max_rel, use = 0, 0.0, 0.0, 0.0
    worst = (False, -1.0, 0, 0.0, 0.0)  # whether it fails, its use of the tolerance or error, flat index, out, ref
    tile = (-1.0, -1.0, (0, 0))  # failed share, mean error, (row, column) of the tile
    squares, bins = 0.0, [0] * (len(BIN_EDGES) + 1)
    for start in range(0, ref_rows.shape[0], step):
        a, b = out_rows[start : start + step].to(wide), ref_rows[start : start + step].to(wide)
        finite = torch.isfinite(a) & torch.isfinite(b)
        error = torch.where(finite, (a - b).abs(), math.inf)
        size = b.abs()
        passed = finite & ((error <= atol) | (error <= rtol * size))
        failed += int((~passed).sum())
        # The smaller quotient is the one that lets an element pass; 0 / 0 uses nothing.
        share = torch.where(error == 0, 0.0, torch.minimum(error / atol, error / (rtol * size)))
        share = torch.where(finite, share, math.inf)
        use = max(use, float(share.max()))
        if spread:
            squares += float(error.double().square().sum())
            edges = torch.tensor(BIN_EDGES, dtype=wide, device=share.device)
            counts = torch.bincount(torch.bucketize(share.flatten(), edges), minlength=len(bins)).tolist()
            bins = [have + more for have, more in zip(bins, counts, strict=True)]
        max_rel = max(max_rel, float((error / size.clamp_min(1e-12)).max()))
        max_abs = max(max_abs, float(error.max()))
        # Among failing elements the one that misses by most; the largest error may lie on one that passes.
        fails = not bool(passed.all())
        rank = torch.where(passed, -1.0, share) if fails else error
        flat = int(rank.argmax())
        top = float(rank.flatten()[flat])
        if (fails, top) > worst[:2]:
            worst = (fails, top, start * width + flat, float(a.flatten()[flat]), float(b.flatten()[flat]))
        tile = max(tile, _worst_tile(error, ~passed, start))
    return GateResult(
        passed=failed == 0,
        total=ref.numel(),
        failed=failed,
        max_abs=max_abs,
        max_rel=max_rel,
        use=use,
        worst_index=tuple(map(int, torch.unravel_index(torch.tensor(worst[2]), ref.shape))),
        out_at_worst=worst[3],
        ref_at_worst=worst[4],
        worst_tile=tile[2],
        worst_tile_failed_share=tile[0],
        worst_tile_mean_abs=tile[1],
        rms=math.sqrt(squares / ref.numel()) if spread else None,
        bins=tuple(bins) if spread else (),
        **names,
    )


def _incomparable(out: Tensor, ref: Tensor) -> str:
    """Return why two tensors cannot be compared element by element, "" when they can."""
    if out.shape != ref.shape or ref.numel() == 0:
        return f"output has shape {tuple(out.shape)}, the reference {tuple(ref.shape)}"
    if out.is_complex() or ref.is_complex():
        return f"output is {out.dtype}, the reference {ref.dtype}; the gate compares real numbers"
    if (out.is_floating_point(), out.dtype.is_signed) != (ref.is_floating_point(), ref.dtype.is_signed):
        return f"output is {out.dtype}, the reference {ref.dtype}, another kind of number"
    return ""


def merge_gates(results: list[GateResult]) -> GateResult:
    """Return one result for several comparisons: counts add up, the worst figures are kept."""
    worst = max(results, key=lambda result: result.use)
    tile = max(results, key=lambda result: (result.worst_tile_failed_share, result.worst_tile_mean_abs))
    return worst.model_copy(
        update={
            "passed": all(result.passed for result in results),
            **{name: sum(getattr(result, name) for result in results) for name in ("total", "failed")},
            **{name: max(getattr(result, name) for result in results) for name in ("max_abs", "max_rel")},
            **{name: getattr(tile, name) for name in ("worst_tile", "worst_tile_failed_share", "worst_tile_mean_abs")},
            "reason": next((result.reason for result in results if result.reason), ""),
        }
    )


def _worst_tile(error: Tensor, failing: Tensor, first_row: int) -> tuple[float, float, tuple[int, int]]:
    """Return failing share, mean error and position of the worst tile of a block of rows."""
    import torch
    from torch.nn.functional import pad

    rows, columns = error.shape
    grid = (-(-rows // TILE), -(-columns // TILE))
    margin = (0, grid[1] * TILE - columns, 0, grid[0] * TILE - rows)

    def per_tile(values: Tensor) -> Tensor:
        return pad(values.to(error.dtype), margin).view(grid[0], TILE, grid[1], TILE).sum(dim=(1, 3))

    inside = per_tile(torch.ones_like(error))
    shares, means = per_tile(failing) / inside, per_tile(error) / inside
    top = shares.max()
    at = int(torch.where(shares == top, means, -1.0).argmax())
    row, column = divmod(at, grid[1])
    return float(top), float(means.flatten()[at]), (first_row // TILE + row, column)
