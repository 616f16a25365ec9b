"""Every rung on a GPU: right against float64 on aligned and ragged sizes, the whole output written, launched again."""

from __future__ import annotations

import pytest
import torch

from rooflane.eval.device.ladder import as_plain, time_ladder
from rooflane.families.ladder import gemm, reduce
from rooflane.families.ladder.launch import bind, normwise_error
from rooflane.families.runtime.host import missing_compiler

CUDA = torch.device("cuda", 0)
# One output; ragged in every size; a tile with an odd K; several tiles; one row of a long K; larger than a wave.
PRODUCTS = [(1, 1, 1), (129, 65, 33), (128, 128, 17), (384, 256, 128), (1, 300, 5001), (2050, 1030, 516)]
VECTORS = [(1, 1), (1, 255), (1, 4097), (1, 1_000_003), (1, 1 << 22)]
ROWS = [(1, 1), (3, 5), (7, 1000), (5, 1027), (300, 4096)]

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0) or missing_compiler():
        pytest.skip("the rungs are for compute capability 9.0 and need NVRTC")


def check(rung, sizes: tuple[int, ...]) -> None:
    if reason := rung.refuse(*sizes):
        pytest.skip(reason)
    drawn = rung.draw(CUDA, *sizes)
    inputs = rung.prepare(drawn)
    # Guards round the output: what is written beside it is found.
    shape, dtype = rung.output_shape(*sizes), getattr(torch, rung.result)
    count = max(1, torch.Size(shape).numel())
    whole = torch.empty(count + 128, dtype=dtype, device=CUDA)
    whole.view(torch.uint8).fill_(0xFF)
    out = whole[64 : 64 + count].view(shape)
    launch = bind(rung, inputs, out)
    launch()
    truth = rung.truth(drawn)
    assert normwise_error(rung.value(out), truth) <= rung.bound
    first = out.clone()
    out.view(torch.uint8).fill_(0xFF)
    launch()
    # Sums by atomics come in another order each time.
    assert normwise_error(rung.value(out), truth) <= rung.bound
    if "atomic" not in rung.name and rung.LADDER == "gemm":
        assert torch.equal(out, first)
    guards = torch.cat([whole[:64], whole[64 + count :]]).view(torch.uint8)
    assert bool((guards == 0xFF).all())


@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
@pytest.mark.parametrize("rung", gemm.RUNGS, ids=lambda rung: rung.name)
def test_a_product_is_right(rung, sizes):
    check(rung, sizes)


@pytest.mark.parametrize("rung", [rung for rung in gemm.RUNGS if rung.name != "naive"], ids=lambda rung: rung.name)
def test_a_large_product_is_right(rung):
    check(rung, (4096, 4096, 4096))


@pytest.mark.parametrize("sizes", VECTORS, ids=str)
@pytest.mark.parametrize("rung", [rung for rung in reduce.RUNGS if rung.task == "sum"], ids=lambda rung: rung.name)
def test_a_sum_is_right(rung, sizes):
    check(rung, sizes)


@pytest.mark.parametrize("sizes", ROWS, ids=str)
@pytest.mark.parametrize("rung", [rung for rung in reduce.RUNGS if rung.task != "sum"], ids=lambda rung: rung.name)
def test_a_reduction_of_rows_is_right(rung, sizes):
    check(rung, sizes)


def test_equal_maxima_give_the_first_place():
    (rung,) = (rung for rung in reduce.RUNGS if rung.task == "argmax")
    x = torch.zeros(4, 1000, device=CUDA)
    x[1, 700:] = 2.0
    x[2] = -torch.inf
    x[3, 999] = 1.0
    out = torch.empty(4, dtype=torch.int32, device=CUDA)
    bind(rung, [x], out)()
    assert out.tolist() == [0, 700, 0, 999]


def test_the_grid_stride_sum_gives_the_same_bits_each_time():
    (rung,) = (rung for rung in reduce.RUNGS if rung.name == "sum grid stride")
    (x,) = rung.draw(CUDA, 1, 1 << 20)
    out = torch.empty(1, device=CUDA)
    launch = bind(rung, [x], out)
    found = set()
    for _ in range(20):
        launch()
        found.add(out.item())
    assert len(found) == 1


@pytest.mark.parametrize(("rungs", "sizes"), [(gemm.RUNGS, (256, 256, 256)), (reduce.RUNGS, (64, 1024))])
def test_a_ladder_is_timed_beside_the_library(rungs, sizes):
    report = time_ladder(rungs, sizes)
    assert not report["refused"]
    assert all(arm.passed and arm.rate > 0 for arm in report["arms"].values())
    assert {rung.name for rung in rungs} < set(report["arms"])
    assert set(as_plain(report)) == set(report)
