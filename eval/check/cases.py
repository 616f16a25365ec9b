"""Inputs by name: two processes that are handed the same `Case` draw the same input, and no tensor has to travel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rooflane.shapes import Shape

# Added to the elements that are changed: far outside the rounding of any dtype, within the range of the data.
NUDGE = 2.0
MASK_NAMES = ("padding 0.3", "one token", "padding alone", "left padding", "holes", "no mask")


@dataclass(frozen=True)
class Case:
    """How one input and its mask are drawn.

    `drawn` is the benchmark's own draw; `mask` one of the mask checks and `stress` one of the stress inputs, by
    `name`; `swapped` has the mask of `seed` and an unpadded x of `seed + 1`; `halved` a mask cut to its first half;
    `nudged` one element of each sequence changed, at a valid token drawn from the seed; `ragged` is padded whatever the
    shape's own padding is; `one mask` has the same padded mask for every sequence.
    """

    seed: int
    padding: float = 0.0
    kind: Literal["drawn", "mask", "stress", "swapped", "halved", "nudged", "ragged", "one mask"] = "drawn"
    name: str = ""

    def as_kind(self, kind: str) -> Case:
        """Return the same seed's case of another kind."""
        return replace(self, kind=kind)


@dataclass(frozen=True)
class OutputFacts:
    """The description of an output that the judge gets with its bytes."""

    # Read from another process: no field may be missing, unknown or of another type.
    __pydantic_config__ = {"strict": True, "extra": "forbid"}

    shape: tuple[int, ...]
    dtype: str
    device: str
    strides: str
    bytes: int


@dataclass(frozen=True)
class Called:
    """A call's output, or why the candidate's weights could not be loaded for the call."""

    # Read from another process: no field may be missing, unknown or of another type.
    __pydantic_config__ = {"strict": True, "extra": "forbid"}

    output: OutputFacts | None
    not_loaded: str = ""


def draw_case(case: Case, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the input `[B, S, D]` and the mask `[B, S]` of a case: ordinary tensors, never inference ones.

    A candidate must not be able to tell the phases apart, so every phase draws here.
    """
    import torch

    from rooflane.eval.check.truth import RAGGED_PADDING, STRESSES, draw_stress, mask_cases

    with torch.inference_mode(False), torch.no_grad():
        if case.kind == "stress":
            stress = next(stress for stress in STRESSES if stress.name == case.name)
            return draw_stress(stress, shape, device, case.seed)
        if case.kind == "mask":
            _, mask = _draw(shape, device, case.seed, RAGGED_PADDING)
            full, _ = _draw(shape, device, case.seed, 0.0)
            return mask_cases(full, mask, case.seed + 1)[case.name]
        padded = case.kind in ("ragged", "one mask")
        x, mask = _draw(shape, device, case.seed, RAGGED_PADDING if padded else case.padding)
        if case.kind == "swapped":
            # Unpadded: zero rows that the mask calls valid would make TF32 eager itself stray past the gate.
            x, _ = _draw(shape, device, case.seed + 1, 0.0)
        elif case.kind == "nudged":
            generator = torch.Generator(device=x.device).manual_seed(case.seed + 1)
            share = torch.rand(2, len(x), generator=generator, device=x.device)
            token, column = (share[0] * mask.sum(dim=1)).long(), (share[1] * x.shape[2]).long()
            x[torch.arange(len(x), device=x.device), token, column] += NUDGE
        elif case.kind == "halved":
            mask[:, (mask.shape[1] + 1) // 2 :] = False
        elif case.kind == "one mask":
            mask = mask[mask.sum(dim=1).argmin()].repeat(len(mask), 1)
            x = x.masked_fill(~mask[:, :, None], 0)
        return x, mask


def _draw(shape: Shape, device: torch.device, seed: int, padding: float) -> tuple[Tensor, Tensor]:
    from rooflane.baseline import config_of, generate_random_case, torch_dtype

    return generate_random_case(config_of(shape), device, torch_dtype(shape.dtype), seed, padding)
