"""The resident kernels on a GPU: every shape they claim at eight seeds, the flags under load, changed weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rooflane.baseline import build_baseline, config_of, copy_model_weights, generate_random_case, reference_numerics
from rooflane.eval.check.gate import check_gate
from rooflane.eval.check.outputs import poison
from rooflane.eval.check.truth import STRESSES, Truth
from rooflane.families import get_family
from rooflane.families.resident.build import build_configured, room_of
from rooflane.families.resident.config import H200 as H200_ROOM
from rooflane.families.resident.kernels.sm90_row_blocks import RowBlocks
from rooflane.families.resident.kernels.sm90_row_warps import RowWarps
from rooflane.families.resident.kernels.sm90_warpgroups import Warpgroups
from rooflane.families.resident.spec import choose
from rooflane.shapes import Shape, load_shapes

pytestmark = pytest.mark.gpu

SEEDS = 8
SHAPES = Path(__file__).parents[3] / "shapes"
# Large enough to wait on each other and small enough to be repeated thousands of times.
ROWS, LARGE = Shape("rows", 16, 128, 128, 4, 128, 4, True), Shape("halves", 60, 128, 128, 4, 128, 4, True)
# What passes keys between programs: sm90 kernels, which the family picks, and Triton's two modes with flags.
SPLIT = [
    ("rowblocks", ROWS),
    ("rowwarps over four", replace(ROWS, d_model=32, ffn_dim=32)),
    ("rowwarps over two", replace(LARGE, d_model=64, ffn_dim=64)),
    ("flagged rows", ROWS),
    ("halves", LARGE),
]
REPEATS = 3000


class H200:
    kind, capability, shared_memory_bytes, units = "cuda", (9, 0), H200_ROOM.shared_bytes, H200_ROOM.units


def build_split(name, model, shape, device):
    """Return the forward of a kernel by name, as the family builds it."""
    if name.startswith("row"):
        return build_sm90(RowBlocks if name == "rowblocks" else RowWarps, model, shape, device)
    config = triton_config(shape, device)
    if config.kernel != name:
        pytest.skip(f"this device takes {config.kernel} for the shape")
    return build_triton(model, shape, device)


def triton_config(shape, device):
    """Return the configuration a shape takes where no sm90 kernel stands before Triton's."""
    return choose(shape, replace(room_of(device), sm90=False)).config


def build_triton(model, shape, device):
    """Return the forward of that configuration."""
    config = triton_config(shape, device)
    return build_configured(model, device, torch.float16, config, room_of(device).units)


def build_sm90(kind, model, shape, device):
    """Return the family's forward for a shape that it must give to one sm90 kernel."""
    room = room_of(device)
    if not room.sm90:
        pytest.skip("needs compute capability 9.0 and cuda-bindings")
    assert type(choose(shape, room).config) is kind
    return get_family("resident").build(model, shape, device)


def in_scope():
    shapes = [shape for name in ("published", "neighbours") for shape in load_shapes(SHAPES / f"{name}.csv")]
    # Half-precision models are judged against float64 alone, by the evaluator: eager itself fails the gate there.
    return [
        shape for shape in shapes if shape.dtype == "float32" and get_family("resident").supports(shape, H200()) is None
    ]


def test_the_published_shapes_and_their_neighbours_are_in_scope():
    names = {shape.id for shape in in_scope()}
    assert {"1", "2", "3", "4", "5", "6", "7", "9", "10", "11", "12"} < names and len(names) > 20


@pytest.mark.parametrize("shape", in_scope(), ids=lambda shape: f"shape-{shape.id}-")
def test_passes_at_eight_seeds(shape, record_property, run_stress):
    """Gate at padding 0 and 0.3 and with holes, stress verdict on every stress input; the worst use is kept."""
    device = torch.device("cuda")
    reference_numerics(device)
    shape = replace(shape, batch_size=min(shape.batch_size, 512))
    reference, model = build_baseline(shape, device, 1), build_baseline(shape, device, 1)
    forward = get_family("resident").build(model, shape, device)
    truth = Truth(reference, shape, device)
    worst = dict.fromkeys(("gate", "stress"), 0.0)
    for seed in range(SEEDS):
        for padding, holes in ((0.0, False), (0.3, False), (0.0, True)):
            x, mask = generate_random_case(config_of(shape), device, torch.float32, seed, padding)
            if holes:
                mask = torch.rand(mask.shape, device=device, generator=torch.Generator(device).manual_seed(seed)) > 0.3
            poison(x)
            with torch.inference_mode():
                found = check_gate(forward(x, mask), reference(x, mask))
            assert found.passed, f"seed {seed}, padding {padding}, holes {holes}: use {found.use:.3f}"
            worst["gate"] = max(worst["gate"], found.use)
        for stress in STRESSES:
            check = run_stress(stress, forward, model, reference, truth, shape, device, seed)
            assert check.passed, f"seed {seed}, {check.name}: {check.gate.use:.3f}"
            worst["stress"] = max(worst["stress"], check.use)
    record_property("worst_use", worst)


# Triton's kernels where an sm90 one stands before them: whole sequences, halves, feed-forwards wider than the model.
TRITON = [
    Shape("halves", 64, 128, 32, 4, 128, 2, True),
    Shape("halves-one-head", 60, 100, 32, 1, 64, 2, True),
    Shape("whole", 200, 128, 32, 4, 128, 2, True),
    Shape("short", 200, 40, 24, 2, 48, 2, False),
    Shape("wide", 64, 128, 64, 8, 256, 2, True),
    Shape("widest", 150, 128, 128, 4, 512, 1, False),
]


@pytest.mark.parametrize("shape", TRITON, ids=lambda shape: shape.id)
def test_tritons_kernels_hold_on_every_device(make_case, shape):
    device = torch.device("cuda")
    model, x, mask, expected = make_case(shape, 5, "prefix")
    forward = build_triton(model, shape, device)
    with torch.inference_mode():
        for _ in range(20):  # wrong code may give the right numbers now and then
            poison(x)
            out = forward(x, mask)
            assert torch.isfinite(out).all() and (out.double() - expected).abs().max() <= 8e-3


@pytest.mark.parametrize(("name", "shape"), SPLIT, ids=[name for name, _ in SPLIT])
def test_keys_pass_between_programs_thousands_of_times_under_load(name, shape):
    """A second stream keeps the multiprocessors busy with products: programs start late and out of step."""
    device = torch.device("cuda")
    model = build_baseline(shape, device, 3)
    forward = build_split(name, model, shape, device)
    x, mask = generate_random_case(config_of(shape), device, torch.float32, 1, 0.3)
    a = torch.randn(2048, 2048, device=device, dtype=torch.float16)
    load = torch.cuda.Stream()
    wrong = torch.zeros((), device=device, dtype=torch.int64)
    with torch.inference_mode():
        expected = forward(x, mask).clone()
        for index in range(REPEATS):
            if index % 4 == 0:
                with torch.cuda.stream(load):
                    a @ a
            wrong += (forward(x, mask) != expected).sum()
        torch.cuda.synchronize()
    assert int(wrong) == 0, "every repeat gives the same bits"


@pytest.mark.parametrize(("name", "shape"), SPLIT, ids=[name for name, _ in SPLIT])
def test_two_forwards_on_two_streams_do_not_wait_for_each_other_for_ever(name, shape):
    device = torch.device("cuda")
    model = build_baseline(shape, device, 3)
    forwards = [build_split(name, model, shape, device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    x, mask = generate_random_case(config_of(shape), device, torch.float32, 1, 0.3)
    with torch.inference_mode():
        expected = forwards[0](x, mask).clone()
        torch.cuda.synchronize()
        for _ in range(200):
            outs = []
            for forward, stream in zip(forwards, streams, strict=True):
                with torch.cuda.stream(stream):
                    outs.append(forward(x, mask))
        torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


BUILDERS = {
    "rowblocks": (ROWS, lambda *arguments: build_sm90(RowBlocks, *arguments)),
    "rowwarps": (replace(ROWS, d_model=32), lambda *arguments: build_sm90(RowWarps, *arguments)),
    "warpgroups": (LARGE, lambda *arguments: build_sm90(Warpgroups, *arguments)),
    "triton": (ROWS, build_triton),
}


@pytest.mark.parametrize("kernel", BUILDERS)
def test_a_call_that_finds_the_weights_changed_runs_on_the_fresh_ones(kernel):
    device = torch.device("cuda")
    shape, builder = BUILDERS[kernel]
    model, other = build_baseline(shape, device, 3), build_baseline(shape, device, 4)
    forward = builder(model, shape, device)
    x, mask = generate_random_case(config_of(shape), device, torch.float32, 1, 0.3)
    with torch.inference_mode():
        forward(x, mask)
        copy_model_weights(other, model)
        out = forward(x, mask)
        assert (out - other(x, mask)).abs().max() < 2e-3
