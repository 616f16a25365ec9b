"""The resident Triton kernels, interpreted, against float64; their packed weights and configurations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from rooflane.families.resident.config import H200, Room, layout_of, packable
from rooflane.families.resident.kernels.flagged_rows import FlaggedRows
from rooflane.families.resident.kernels.layered_rows import LayeredRows
from rooflane.families.resident.kernels.whole import Halves, Whole
from rooflane.families.resident.pack import pack_padded
from rooflane.families.resident.spec import choose
from rooflane.families.resident.triton_steps import gelu
from rooflane.families.runtime import launch as launching
from rooflane.shapes import Shape, load_shapes

# Tens of seconds in all: `make check` leaves them out.
pytestmark = pytest.mark.slow

# Half-precision operands with float32 sums over two layers of values near 3.
TOLERANCE = 8e-3
FFN_TILE = 16


def triton_config(shape, room=H200):
    """Return the configuration a shape takes where no sm90 kernel stands before Triton's."""
    return choose(shape, replace(room, sm90=False)).config


def run(model, x, mask, config):
    """Launch a configuration by hand on poisoned memory; programs run one after the other in the interpreter."""
    packed = config.pack(model, torch.float16)
    out = torch.full_like(x, float("nan"))
    scratch = x.new_full((config.scratch_elements,), float("nan"), dtype=torch.float16)
    flags = torch.zeros(config.flags, dtype=torch.int32, device=x.device)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, **config.constants(mask is not None)}
    held, sizes = (scratch, flags, packed["weights"], packed["biases"]), config.sizes(1e-5)
    if isinstance(config, LayeredRows):
        run_layered(config, x, mask, out, scratch.view(2, -1), packed, options)
    else:
        config.function()[(config.programs,)](x, mask, out, *held, *sizes, **options)
    assert not flags.any(), "the next call finds the flags as this one did"
    return out


def run_layered(config, x, mask, out, qkv, packed, options):
    """Launch the layers one behind the other, as the graph does: the launch boundary is the exchange."""
    residual, layers, layout = torch.full_like(x, float("nan")), config.shape.num_layers, config.layout
    for step in range(layers + 1):
        last, finished = step == layers, max(step - 1, 0)
        config.function()[(config.programs,)](
            x if step < 2 else residual, mask, out if last else residual, qkv[(step + 1) % 2], qkv[step % 2],
            packed["weights"][finished * layout.layer_weights :], packed["biases"][finished * layout.layer_biases :],
            *config.sizes(1e-5), FIRST=step == 0, LAST=last, **options,
        )  # fmt: skip


# Sizes off every tile: 37 of 64 rows, 48 of 64 columns, 3 heads, ffn 40; heads of 4 packed four to a tile; one token.
SMALL = Shape("small", 2, 37, 48, 3, 40, 2, True)
NARROW = Shape("narrow", 2, 40, 32, 8, 48, 2, True)
CASES = [
    Whole(SMALL, 64, 16, 4, 2, 1, 1),
    Halves(SMALL, 32, 32, 4, 2, 1, 1),
    LayeredRows(SMALL, 16, 16, 4, 2, 1),
    Whole(NARROW, 64, 64, 4, 2, 1, 4),
    Halves(NARROW, 32, 16, 4, 2, 1, 4),
    FlaggedRows(NARROW, 16, 64, 4, 1),
    LayeredRows(NARROW, 16, 16, 4, 1, 4),
    Whole(Shape("grouped", 5, 13, 32, 4, 48, 2, True), 64, 16, 4, 2, 4, 2),
    LayeredRows(Shape("both-ways", 2, 33, 64, 4, 48, 2, False), 16, 16, 4, 2, 2),
    Whole(Shape("whole-both-ways", 3, 20, 16, 1, 16, 1, False), 64, 16, 4, 2, 2, 1),
    Whole(Shape("token", 2, 1, 16, 2, 16, 3, True), 16, 16, 4, 2, 1, 2),
    Whole(Shape("wide-head", 1, 20, 128, 1, 64, 1, True), 32, 64, 4, 2, 1, 1),
]


# A mask with holes holds all that a prefix does but whole rows of keys behind the end: one configuration a kernel shows
# those.
PREFIXES = {type(config): config for config in reversed(CASES)}.values()


@pytest.mark.parametrize(
    ("config", "kind"),
    [(config, kind) for config in CASES for kind in ("none", "holes")] + [(config, "prefix") for config in PREFIXES],
    ids=lambda value: value if isinstance(value, str) else f"{value.kernel}-{value.shape.id}",
)
def test_kernels_equal_float64(make_case, config, kind):
    model, x, mask, expected = make_case(config.shape, 5, kind)
    out = run(model, x, mask, config)
    assert torch.isfinite(out).all(), "every element of the poisoned output is written"
    assert (out.double() - expected).abs().max() <= TOLERANCE
    if mask is not None:
        assert not out[~mask].any()


def test_packing_folds_norms_scale_and_value_bias(make_case):
    """Undo the packing of one head by hand: q = (normed Wq' + bq') must be the scaled projection of the normed row."""
    shape = Shape("a", 1, 3, 16, 1, 16, 1)
    model, x, _, _ = make_case(shape, 3, "none")
    layout = layout_of(shape, FFN_TILE)
    packed = pack_padded(model, layout, torch.float64)
    layer = model.double().layers[0]
    row = torch.nn.functional.layer_norm(x.double()[0], (16,))
    q = row @ packed["weights"][:256].view(16, 16) + packed["biases"][:16].double()
    expected = layer.attention.q_proj(layer.norm1(x.double()[0])) * 16**-0.5 * 1.4426950408889634
    torch.testing.assert_close(q, expected.detach(), atol=1e-5, rtol=0)
    out_bias = layer.attention.out_proj.bias + layer.attention.out_proj.weight @ (
        layer.attention.v_proj.bias + layer.attention.v_proj.weight @ layer.norm1.bias
    )
    torch.testing.assert_close(packed["biases"][16:32].double(), out_bias.detach(), atol=1e-6, rtol=0)


def test_layout_counts_every_weight():
    layout = layout_of(Shape("a", 1, 1, 96, 3, 200, 2), 64)
    assert (layout.width, layout.head, layout.ffn) == (128, 32, 256)
    assert layout.layer_weights == 128 * (4 * 96 + 2 * 256)
    assert layout.layer_biases == 96 + 2 * 128 + 256


@pytest.mark.parametrize(("heads", "d_model", "pack"), [(16, 128, 2), (4, 128, 1), (4, 16, 4), (3, 24, 1), (4, 24, 1)])
def test_narrow_heads_share_a_tile_only_where_none_of_it_is_padding(heads, d_model, pack):
    shape = Shape("a", 1, 1, d_model, heads, 16, 1)
    assert packable(shape) == pack
    layout = layout_of(shape, 16, pack)
    assert layout.tiles * pack == heads
    assert pack == 1 or layout.heads_width == d_model


def test_the_published_shapes_take_the_modes_they_were_measured_fastest_in(root):
    shapes = {shape.id: shape for shape in load_shapes(root / "shapes" / "published.csv")}
    modes = {name: triton_config(shape).kernel for name, shape in shapes.items() if shape.d_model <= 128}
    del modes["13"]  # its sequence is over the family's limit
    flagged, halves = ["2", "3", "4", "12"], ["1", "7", "11"]
    assert modes == {
        name: "flagged rows" if name in flagged else "halves" if name in halves else "whole" for name in modes
    }


def test_configurations_follow_the_device_and_the_mask():
    small = Shape("a", 1, 128, 128, 4, 128, 4)
    consumer = Room(128, 99 * 1024)
    assert triton_config(small).kernel == "flagged rows"
    assert triton_config(small, consumer).kernel == "halves", "thin rows need more shared memory than it has"
    assert triton_config(Shape("a", 1, 128, 128, 4, 128, 4, False)).kernel == "layered rows"
    assert triton_config(Shape("a", 64, 128, 128, 4, 128, 4, False)).kernel == "whole"
    assert triton_config(Shape("a", 1000, 16, 128, 4, 128, 4)).group == 4
    for batch in (1, 16, 64, 128, 10_000):
        config = triton_config(Shape("a", batch, 128, 128, 4, 128, 4))
        assert config.kernel == "flagged rows" or config.num_stages > 1, "one pipeline stage goes wrong on Hopper"


@pytest.mark.parametrize("width", [24, 32])
@pytest.mark.parametrize("batch", [64, 200])
def test_a_model_of_32_columns_takes_its_feed_forward_in_tiles_of_32(width, batch):
    """Wider ones are wrong on Hopper as Triton 3.6 compiles them."""
    config = triton_config(Shape("a", batch, 128, width, 4, 128, 4))
    assert config.kernel == ("halves" if batch == 64 else "whole") and config.ffn_tile == 32
    for other in (16, 64):
        assert triton_config(Shape("a", batch, 128, other, 4, 128, 4)).ffn_tile == 128


def test_scratch_is_bounded_by_the_device_and_not_the_batch():
    held = []
    for batch in range(1, 300):
        shape = Shape("a", batch, 128, 128, 4, 128, 4)
        config = triton_config(shape)
        held.append(config.scratch_elements * 2 + config.flags * 4)
    # Halves at most: 66 sequences, 4 layers, keys and values of 64 rows of 128 columns, two bytes each; and a flag.
    assert max(held) == 66 * (4 * 2 * 64 * 128 * 2 + 4)
    assert held[200] == 0


@triton.jit
def gelu_probe(x_ptr, out_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out_ptr + index, gelu(tl.load(x_ptr + index)))


def test_gelu_polynomial_keeps_its_stated_error(device):
    x = torch.cat([torch.linspace(-12, 12, 4094), torch.tensor([-1e4, 1e4])]).to(device)
    out = torch.empty_like(x)
    gelu_probe[(1,)](x, out, BLOCK=4096)
    exact = 0.5 * x.double() * (1 + torch.erf(x.double() / 2**0.5))
    assert ((out.double() - exact).abs() / x.double().abs().clamp(min=1)).max() <= 1.1e-4


class Interpreted:
    """Stands in for a bound kernel: launches the interpreter on the tensors that the pointers of a call lie in."""

    held: list[torch.Tensor] = []

    def __init__(self, function, grid, sample, constants, warps, stages):
        self._function, self._grid, self._constants, self._sample = function, grid, constants, sample
        for value in sample:
            if isinstance(value, torch.Tensor):
                self.held.append(value.new_empty(0).set_(value.untyped_storage()))

    def __call__(self, stream, *arguments):
        pairs = zip(self._sample, arguments, strict=True)
        launched = [self._behind(got) if isinstance(bound, torch.Tensor) else got for bound, got in pairs]
        self._function[(self._grid,)](*launched, **self._constants)

    def _behind(self, pointer):
        for tensor in self.held:
            offset = pointer - tensor.data_ptr()
            if 0 <= offset < tensor.nbytes:
                return tensor[offset // tensor.itemsize :]
        raise AssertionError("a launch was given a pointer to none of the tensors it was bound to")


class Replayed:
    """Stands in for a staged graph: its body runs again on fixed memory, which each call fills."""

    def __init__(self, body, x, mask, device):
        self._body, self._x, self._mask = body, torch.zeros_like(x), None if mask is None else torch.ones_like(mask)
        body(self._x, self._mask)

    def run(self, stream, x, mask):
        self._x.copy_(x)
        if mask is not None:
            self._mask.copy_(mask)
        self._body(self._x, self._mask)


@pytest.mark.parametrize("layers", [1, 3])
def test_layered_rows_bind_a_launch_a_layer_and_one_that_writes_the_output(monkeypatch, make_case, device, layers):
    if device.type == "cuda":
        pytest.skip("on a GPU the forward itself is tested")
    monkeypatch.setattr(launching, "BoundKernel", Interpreted)
    monkeypatch.setattr(launching, "StagedGraph", Replayed)
    monkeypatch.setattr(launching, "raw_stream", lambda index: 0)
    monkeypatch.setattr(Interpreted, "held", [])
    config = LayeredRows(Shape("both-ways", 2, 17, 32, 4, 48, layers, False), 16, 16, 4, 1, 2)
    model, x, mask, expected = make_case(config.shape, 5, "holes")
    weights = config.pack(model, torch.float16)
    bind = config.binder(weights, torch.float16, model.final_norm.eps, H200.units)
    launch = bind(x, mask, torch.empty_like(x))
    # Each of two calls writes the whole of its own output.
    for _ in range(2):
        out = torch.full_like(x, float("nan"))
        Interpreted.held.append(out.view(-1))
        launch(0, x, mask, out)
        assert (out - expected).abs().max() < TOLERANCE
