"""The resident kernels on a GPU: every shape they claim at eight seeds, the flags under load, changed weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rooflane.baseline import build_baseline, config_of, copy_model_weights, generate_random_case, reference_numerics
from rooflane.eval.verify import verify
from rooflane.families import get_family
from rooflane.families.resident.build import build_configured
from rooflane.families.resident.config import HOPPER, resident_config
from rooflane.shapes import Shape, load_shapes

pytestmark = pytest.mark.gpu

SEEDS = range(8)
# Large enough to wait on each other and small enough to be repeated thousands of times.
FLAGGED = [Shape("rows", 16, 128, 128, 4, 128, 4, True), Shape("halves", 60, 128, 128, 4, 128, 4, True)]
REPEATS = 3000


class H200:
    kind, capability, shared_memory_bytes, units = "cuda", (9, 0), HOPPER.shared_bytes, HOPPER.units


def in_scope(root):
    shapes = load_shapes(root / "shapes" / "published.csv") + load_shapes(root / "shapes" / "neighbours.csv")
    return [shape for shape in shapes if get_family("resident").supports(shape, H200()) is None]


def test_every_shape_in_scope_passes_at_eight_seeds(root, record_property):
    """Gate at padding 0 and 0.3 and with holes, stress inputs and promises, the worst use of the tolerance kept."""
    device = torch.device("cuda")
    reference_numerics(device)
    worst = {}
    for shape in in_scope(root):
        small = replace(shape, batch_size=min(shape.batch_size, 512))
        reference, model = build_baseline(small, device, 1), build_baseline(small, device, 1)
        forward = get_family("resident").build(model, small, device)
        for seed in SEEDS:
            found = verify(forward, model, reference, small, device, seed=seed * 1000, trials=1)
            assert found.status == "ok", f"{shape.id} at seed {seed}: {found.reason}"
            uses = [found.gate.use, *(gate.use for gate in found.ragged.values())]
            worst[shape.id] = max(worst.get(shape.id, 0.0), *uses)
    record_property("worst_use", worst)
    assert len(worst) > 20 and max(worst.values()) < 1


@pytest.mark.parametrize("shape", FLAGGED, ids=lambda shape: shape.id)
def test_flags_hold_thousands_of_times_under_load(shape):
    """A second stream keeps the multiprocessors busy with products: programs start late and out of step."""
    device = torch.device("cuda")
    model = build_baseline(shape, device, 3)
    forward = get_family("resident").build(model, shape, device)
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


@pytest.mark.parametrize("shape", FLAGGED, ids=lambda shape: shape.id)
def test_two_forwards_on_two_streams_do_not_wait_for_each_other_for_ever(shape):
    device = torch.device("cuda")
    model = build_baseline(shape, device, 3)
    forwards = [get_family("resident").build(model, shape, device) for _ in range(2)]
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


def test_a_call_that_finds_the_weights_changed_runs_on_the_fresh_ones():
    device = torch.device("cuda")
    shape = FLAGGED[0]
    model, other = build_baseline(shape, device, 3), build_baseline(shape, device, 4)
    forward = build_configured(model, shape, device, torch.float16, resident_config(shape))
    x, mask = generate_random_case(config_of(shape), device, torch.float32, 1, 0.3)
    with torch.inference_mode():
        forward(x, mask)
        copy_model_weights(other, model)
        out = forward(x, mask)
        assert (out - other(x, mask)).abs().max() < 2e-3
