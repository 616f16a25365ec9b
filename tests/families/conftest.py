"""Shared by the family tests: the device (CUDA, else the CPU with Triton interpreted), a float64 oracle, a driver."""

from __future__ import annotations

import copy
import ctypes

import pytest
import torch

from rooflane.baseline import BaselineTransformer, build_baseline, config_of, generate_random_case, torch_dtype
from rooflane.families.runtime.cuda_kernel import parameter_bits
from rooflane.families.runtime.host import SIZES, PythonLauncher, host_compiler, host_module, python_header
from rooflane.shapes import Shape


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def make_case(device):
    """Return `(shape, seed, mask kind) -> model, x, mask, float64 output`; no weight stays at 0 or 1."""

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


DRIVER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *SIZES, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)


class Driver:
    """Replaces the driver: records each launch and returns the statuses in turn, the last one from then on."""

    FUNCTION = 0x1234_5678_9ABC
    FIXED = (0x7F00_0000_1000, 4, parameter_bits(1e-5), 2**64 - 1)

    def __init__(self, *statuses: int) -> None:
        self.calls: list[tuple[int, tuple[int, ...], int, list[int]]] = []
        left = list(statuses or (0,))

        def launch(function, *arguments):
            *sizes, stream, parameters, extra = arguments
            assert extra is None
            count = 3 + len(self.FIXED)
            bits = [ctypes.cast(parameters[i], ctypes.POINTER(ctypes.c_uint64))[0] for i in range(count)]
            self.calls.append((function, tuple(sizes), stream or 0, bits))
            return left.pop(0) if len(left) > 1 else left[0]

        self._kept = DRIVER(launch)
        self.entry = ctypes.cast(self._kept, ctypes.c_void_p).value

    def launcher(self, kind=PythonLauncher, fixed=FIXED, enter=lambda: None, held=None):
        return kind(self.entry, self.FUNCTION, 132, 256, 217600, fixed, enter, held)


@pytest.fixture
def compiled():
    """The compiled module of the C++ host path."""
    if not (host_compiler() and python_header().exists()):
        pytest.skip("needs a C++ compiler and Python's headers")
    return host_module()


@pytest.fixture
def stand_in() -> type[Driver]:
    return Driver


@pytest.fixture
def tensors():
    """An input `[2, 3, 8]`, a mask and an output."""
    return torch.ones(2, 3, 8), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3, 8)
