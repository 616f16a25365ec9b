"""What the family tests share: the device (CUDA, else the CPU with Triton interpreted) and a float64 oracle."""

from __future__ import annotations

import copy

import pytest
import torch

from rooflane.baseline import BaselineTransformer, build_baseline, config_of, generate_random_case, torch_dtype
from rooflane.shapes import Shape


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def make_case(device):
    """Return `(shape, seed, mask kind) -> model, x, mask, float64 output`; no weight is left at 0 or 1."""

    def make(shape: Shape, seed: int, kind: str):
        model = build_baseline(shape, device, seed)
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, device=device)
                parameter.add_(0.1 * noise.to(parameter.dtype))
        padding = 0.5 if kind == "prefix" else 0.0
        x, mask = generate_random_case(config_of(shape), device, torch_dtype(shape.dtype), seed, padding)
        if kind == "holes":
            mask = torch.rand(mask.shape, generator=generator, device=device) > 0.4
            mask[:, 0] = False
            mask[:, -1] = True
        if kind == "none":
            mask = None
        return model, x, mask, oracle(model, x, mask)

    return make


def oracle(model: BaselineTransformer, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the reference output in float64."""
    with torch.inference_mode():
        return copy.deepcopy(model).double()(x.double(), mask)
