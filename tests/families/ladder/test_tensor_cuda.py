"""The tensor-core rungs on a GPU: exact on small integers, right on ragged sizes, nothing written beside the output."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rooflane.families.ladder.gemm.tensor import OPERANDS, TENSOR, PersistentRung, persistent
from rooflane.families.ladder.launch import bind, normwise_error
from rooflane.families.runtime.host import missing_compiler

CUDA = torch.device("cuda", 0)
# One row; one tile; ragged in every size; more tiles than a wave; a long K; K within the first step and the ring.
PRODUCTS = [(1, 8, 8), (128, 256, 64), (130, 264, 72), (257, 520, 200), (2050, 1032, 520), (300, 8, 4096)]
LARGE = [(4096, 4096, 4096), (8192, 384, 1536)]
RUNGS = list(TENSOR)
PLAIN = [rung for rung in RUNGS if rung.operand == "float16" and not getattr(rung, "bias", False)]
BY_COLUMNS = [(256, False), (192, False), (128, False), (192, True), (128, True)]

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0) or missing_compiler():
        pytest.skip("the rungs are for compute capability 9.0 and need NVRTC")


def launch(rung, inputs: list[torch.Tensor], sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the output of two launches that agree, written whole and nothing beside it."""
    shape, dtype = rung.output_shape(*sizes), getattr(torch, rung.result)
    count = torch.Size(shape).numel()
    whole = torch.empty(count + 128, dtype=dtype, device=CUDA)
    whole.view(torch.uint8).fill_(0xFF)
    out = whole[64 : 64 + count].view(shape)
    call = bind(rung, inputs, out)
    call()
    first = out.clone()
    out.view(torch.uint8).fill_(0xFF)
    call()
    assert torch.equal(first, out)
    assert bool((torch.cat([whole[:64], whole[64 + count :]]).view(torch.uint8) == 0xFF).all())
    return out


def check(rung, sizes: tuple[int, ...]) -> None:
    if reason := rung.refuse(*sizes):
        pytest.skip(reason)
    drawn = rung.draw(CUDA, *sizes)
    assert normwise_error(rung.value(launch(rung, rung.prepare(drawn), sizes)), rung.truth(drawn)) <= rung.bound


@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
@pytest.mark.parametrize("rung", PLAIN, ids=lambda rung: rung.name)
def test_a_product_of_small_integers_is_exact(rung, sizes):
    """Sums stay below 2,048, so that float16 holds them: a wrong place, row or depth shows as a whole number."""
    m, n, k = sizes
    generator = torch.Generator(CUDA).manual_seed(3)
    span = 2 if k < 512 else 1
    a, w = (
        torch.randint(-span, span + 1, shape, generator=generator, device=CUDA).half() for shape in ((m, k), (n, k))
    )
    assert torch.equal(launch(rung, [a, w], sizes).float(), a.float() @ w.float().T)


@pytest.mark.parametrize("sizes", [*PRODUCTS, *LARGE], ids=str)
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_a_product_is_right(rung, sizes):
    check(rung, sizes)


@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
@pytest.mark.parametrize("rung", PLAIN, ids=lambda rung: rung.name)
def test_a_product_of_bfloat16_is_right(rung, sizes):
    kind = OPERANDS["bfloat16"]
    check(dataclasses.replace(rung, operand="bfloat16", result=kind.result, bound=kind.bound), sizes)


@pytest.mark.parametrize("sizes", [(130, 264, 72), (2050, 1032, 520)], ids=str)
@pytest.mark.parametrize("more", [
    {"bias": True}, {"bias": True, "activation": "relu"}, {"bias": True, "activation": "gelu"},
    {"bias": True, "activation": "gelu tanh"}, {"bias": True, "activation": "gelu pairs"}, {"residual": True}, {"norm": True, "bias": True},
    {"norm": True, "bias": True, "activation": "gelu"}, {"bias": True, "residual": True, "row_sums": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize(("columns", "pingpong"), BY_COLUMNS)
def test_every_epilogue_is_right_with_every_tile(columns, pingpong, more, sizes):
    check(persistent("one", columns, "", 1.0, "", pingpong=pingpong, **more), sizes)


@pytest.mark.parametrize(("columns", "pingpong"), BY_COLUMNS)
def test_row_sums_are_the_moments_of_what_was_stored_and_feed_the_next_norm(columns, pingpong):
    """Rows are stored times 1/4: the product of each is scaled to fit, and a norm gives what it gives unscaled rows."""
    sizes = m, n, _ = 391, 520, 136
    rung = persistent("sums", columns, "", 1.0, "", pingpong=pingpong, residual=True, row_sums=True)
    drawn = rung.draw(CUDA, *sizes)
    a, w, inverses, residual, moments = rung.prepare(drawn)
    inverses.fill_(0.25)
    stream = launch(rung, [a, w, inverses, (residual.float() / 4).half(), moments], sizes)
    stored = rung.value(stream)
    assert normwise_error(stored * 4, rung.truth(drawn)) <= rung.bound
    wanted = torch.stack([stored.sum(1), stored.square().sum(1)], 1)
    assert normwise_error(moments.double().sum(0), wanted) <= 1e-6
    norm = persistent("norm", columns, "", 1.0, "", pingpong=pingpong, norm=True)
    assert moments.shape[0] == -(-n // columns)
    behind = [(stored * 4).float(), torch.randn(264, n, device=CUDA)]
    _, w, _, column_sums, _ = norm.prepare(behind)
    result = torch.empty(m, 264, dtype=torch.float16, device=CUDA)
    with pytest.raises(ValueError, match="it needs float32"):
        bind(norm, [stream[0], w, moments.half(), column_sums, inverses], result)
    several = dataclasses.replace(norm, moment_tiles=moments.shape[0])
    bind(several, [stream[0], w, moments, column_sums, inverses], result)()
    assert normwise_error(result, norm.truth(behind)) <= norm.bound


@pytest.mark.parametrize(
    "rung", [rung for rung in RUNGS if isinstance(rung, PersistentRung)], ids=lambda rung: rung.name
)
def test_fewer_blocks_than_tiles_give_the_same(rung, monkeypatch):
    """A device of eight units: each block takes many tiles, and its ring goes round many times."""
    sizes = (2050, 1032, 520)
    inputs = rung.prepare(rung.draw(CUDA, *sizes))
    wanted = launch(rung, inputs, sizes)
    grid = type(rung).grid
    monkeypatch.setattr(type(rung), "grid", lambda self, units, *sizes: grid(self, 8, *sizes))
    assert torch.equal(launch(rung, inputs, sizes), wanted)
