"""The ledger against hand counts, torch's FLOP counter and the tensors a real forward keeps alive."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from rooflane.dispatch import ledger, peak_bytes, weight_bytes
from rooflane.shapes import Shape

GIB = 2**30


def inputs(shape):
    import torch

    from rooflane.baseline import torch_dtype

    x = torch.ones(shape.batch_size, shape.seq_len, shape.d_model, dtype=torch_dtype(shape.dtype))
    return x, torch.ones(shape.batch_size, shape.seq_len, dtype=torch.bool)


@pytest.mark.parametrize(
    ("changes", "masked", "operations"),
    [
        ({}, True, 132),  # 32 a layer and 4 behind, as the benchmark's contract counts them
        ({"causal": False}, True, 4 * 28 + 4),  # no ones, triu, copy, fill
        ({}, False, 4 * (32 - 9) + 1),  # no inversion (3), copy and fill (2 each) of keys, output, block; no final fill
        ({"num_layers": 1}, True, 36),
        ({"dtype": "float16"}, True, 4 * 34 + 4),  # cast up, cast down
        ({"dtype": "bfloat16"}, True, 4 * 34 + 4),
        ({"batch_size": 10000}, True, 144),  # scores of 2.6 GB: the scale and two fills run in halves
    ],
)
def test_device_operations(published, changes, masked, operations):
    assert ledger(replace(published["2"], **changes), masked).device_ops == operations


def test_kernels_and_copies_of_the_published_forward(published):
    book = ledger(published["2"])
    assert (book.device_ops - book.memcpys, book.memcpys) == (115, 17)


def test_operations_of_one_layer_by_part_of_the_contract_table(published):
    names = [op.name for op in ledger(published["2"]).ops if op.layer == 0]
    kinds = Counter(op.kind for op in ledger(published["2"]).ops if op.layer == 0)
    assert len(names) == len(set(names)) == 32
    # 6 GEMMs and 2 batched; 4 head copies; 4 copies of fills; scale, ones, triu, 4 fills, 3 inversions, gelu, 2 adds
    assert kinds == {"norm": 2, "matmul": 8, "layout": 4, "memcpy": 4, "softmax": 1, "pointwise": 13}


@pytest.mark.parametrize("changes", [{}, {"causal": False}, {"dtype": "float16"}, {"num_layers": 3}], ids=str)
@pytest.mark.parametrize("masked", [True, False])
def test_device_operations_equal_the_kernels_torch_is_asked_for(small, changes, masked):
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from rooflane.baseline import build_baseline

    views = {"view", "_unsafe_view", "t", "transpose", "expand", "unsqueeze", "slice", "alias", "detach"}
    two_steps = {"masked_fill"}  # out of place: a copy, then a fill

    class Count(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            self.operations += 0 if name in views else 2 if name in two_steps else 1
            return func(*args, **(kwargs or {}))

    shape = replace(small, **changes)
    model = build_baseline(shape, "cpu", 0)
    x, mask = inputs(shape)
    with torch.no_grad(), Count() as count:
        model(x, mask if masked else None)
    assert ledger(shape, masked).device_ops == count.operations


def test_splits_begin_above_two_gib(published):
    def scale(batch):
        return next(op for op in ledger(replace(published["2"], batch_size=batch)).ops if op.name == "scale").device_ops

    fits = 2 * GIB // (4 * 128 * 128 * 4)  # batch at which fp32 scores are exactly 2 GiB
    assert [scale(fits), scale(fits + 1), scale(2 * fits), scale(2 * fits + 1)] == [1, 2, 2, 4]


def test_bytes_of_the_score_ops_by_hand():
    shape = Shape("hand", batch_size=2, seq_len=3, d_model=4, num_heads=2, ffn_dim=4, num_layers=1)
    sizes = {op.name: op.bytes for op in ledger(shape).ops}
    scores = 2 * 2 * 3 * 3 * 4
    activation = 2 * 3 * 4 * 4
    assert sizes["scores"] == 2 * activation + scores
    assert sizes["scale"] == 2 * scores
    assert sizes["causal_fill.fill"] == 2 * scores + 9
    assert sizes["key_fill.fill"] == 2 * scores + 6
    assert sizes["softmax"] == 2 * scores
    assert sizes["q_proj"] == 2 * activation + (16 + 4) * 4
    assert sizes["attention_residual"] == 3 * activation


def test_half_precision_softmax_runs_in_float32():
    shape = Shape("half", 2, 3, 4, 2, 4, 1, dtype="float16")
    sizes = {op.name: op.bytes for op in ledger(shape).ops}
    elements = 2 * 2 * 3 * 3
    assert sizes["softmax"] == 8 * elements
    assert sizes["softmax_widen"] == sizes["softmax_narrow"] == 6 * elements


@pytest.mark.parametrize("causal", [True, False])
def test_matmul_flops_equal_torchs_counter(small, causal):
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from rooflane.baseline import build_baseline

    shape = replace(small, causal=causal)
    model = build_baseline(shape, "cpu", 0)
    x, mask = inputs(shape)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(x, mask)
    assert ledger(shape).flops == counter.get_total_flops()


def test_weight_bytes_equal_the_models(small):
    from rooflane.baseline import build_baseline

    model = build_baseline(small, "cpu", 0)
    assert weight_bytes(small) == sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape("scores", 2, 96, 16, 4, 16, 3),  # scores dominate
        Shape("scores-full", 2, 96, 16, 4, 16, 3, causal=False),
        Shape("one-layer", 2, 96, 16, 4, 16, 1),  # the layer's input is the caller's
        Shape("wide", 4, 8, 32, 2, 256, 2),  # the feed-forward dominates
        Shape("square", 1, 64, 16, 1, 16, 2),  # one head: the masks weigh as much as a quarter of the scores
        Shape("thin", 16, 1, 64, 1, 64, 2),  # no scores to speak of
    ],
    ids=lambda shape: shape.id,
)
def test_peak_equals_the_tensors_a_forward_keeps_alive(shape, dtype):
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    from rooflane.baseline import build_baseline

    class Alive(TorchDispatchMode):
        """Count the bytes of every distinct storage still referenced after each op."""

        def __init__(self):
            super().__init__()
            self.storages = {}
            self.peak = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            self.storages = {key: held for key, held in self.storages.items() if not held[0].expired()}
            self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
            return result

    shape = replace(shape, dtype=dtype)
    model = build_baseline(shape, "cpu", 0)
    x, mask = inputs(shape)
    with torch.inference_mode(), Alive() as alive:
        model(x, mask)
    held = weight_bytes(shape) + x.numel() * x.element_size() + mask.numel()
    assert peak_bytes(shape) == pytest.approx(held + alive.peak, rel=0.02)


def test_peak_of_the_shape_that_does_not_fit(published):
    # Two live fp32 score tensors of 20.48 TB each dwarf everything else.
    assert peak_bytes(published["14"]) == pytest.approx(2 * 20.48e12, rel=0.01)
