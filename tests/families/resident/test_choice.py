"""Which kernel takes which shape: the ladder, its reasons, and the choices and figures as they stood at 58067ee."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rooflane.dispatch import load_profile
from rooflane.families import get_family
from rooflane.families.resident import build as building
from rooflane.families.resident.config import H200, LIMITS, Room
from rooflane.families.resident.sm90_config import Sm90Config
from rooflane.families.resident.spec import choose, ladder
from rooflane.shapes import Shape, load_shapes

CONSUMER = Room(128, 99 * 1024)
PUBLISHED = Shape("published", 64, 128, 128, 4, 128, 4, True)


def kernel(shape: Shape, room: Room = H200) -> str:
    return choose(shape, room).config.kernel


def in_limits(root):
    shapes = [shape for name in ("published", "neighbours") for shape in load_shapes(root / "shapes" / f"{name}.csv")]
    return [shape for shape in shapes if all(getattr(shape, name) <= limit for name, limit in LIMITS)]


# The draw of 5,000 shapes and rooms, and a short hash of what each took at 58067ee.
ROOMS = [
    Room(132, 232448, True), Room(132, 232448), Room(108, 166912), Room(128, 101376), Room(24, 101376),
]  # fmt: skip
HEAD_COUNTS, HEAD_DIMS = (1, 2, 3, 4, 6, 8, 16), (4, 8, 12, 16, 24, 32, 40, 64, 128)
# Names as the hashes have them.
OLD_NAMES = {"rowblocks": "row blocks", "rowwarps": "row warps", "PAIR": "TWINS"}


def drawn_shapes(count=5000, seed=58067):
    rng = random.Random(seed)
    for number in range(count):
        heads, head_dim = rng.choice(HEAD_COUNTS), rng.choice(HEAD_DIMS)
        while heads * head_dim > 128:
            heads, head_dim = rng.choice(HEAD_COUNTS), rng.choice(HEAD_DIMS)
        d_model = heads * head_dim
        seq_len = rng.choice((rng.randint(1, 128), 16, 17, 31, 32, 64, 65, 128))
        batch = rng.choice((1, 2, 4, 7, 16, 33, 64, 66, 67, 128, 132, 133, 265, 1000, 10000, rng.randint(1, 500)))
        ffn = rng.choice((d_model, 2 * d_model, 4 * d_model, rng.randint(1, 512)))
        dtype = rng.choice(("float32", "float32", "float16", "bfloat16"))
        layers, causal = rng.choice((1, 2, 4, 12)), rng.random() < 0.6
        room = ROOMS[number % 2 if number % 3 else number // 3 % 5]
        yield Shape(str(number), batch, seq_len, d_model, heads, min(ffn, 512), layers, causal, dtype=dtype), room


def label(config, room):
    """Return the facts of a configuration: all that decides its launch and its machine code."""
    name = OLD_NAMES.get(config.kernel, config.kernel)
    if isinstance(config, Sm90Config):
        constants = sorted((OLD_NAMES.get(key, key), value) for key, value in config.constants(True, False).items())
        sizes = (config.programs(room.units), config.threads, config.shared_bytes, config.packed_bytes)
        return [name, *sizes, config.scratch_words, config.flags, constants]
    group, pack = getattr(config, "group", 1), getattr(config, "pack_heads", 1)
    heads = config.shape.num_heads if name == "flagged rows" else getattr(config, "heads_a_step", 1)
    return [name, config.rows, group, pack, heads, config.ffn_tile, config.num_warps, config.num_stages]


def test_five_thousand_drawn_shapes_take_what_they_took():
    expected = json.loads((Path(__file__).parent / "choices-58067ee.json").read_text())
    labels = [label(choose(shape, room).config, room) for shape, room in drawn_shapes()]
    found = [hashlib.sha256(json.dumps(one).encode()).hexdigest()[:8] for one in labels]
    changed = [(one, shape, room) for one, was, now, (shape, room) in
               zip(labels, expected, found, drawn_shapes(), strict=True) if was != now]  # fmt: skip
    assert not changed, changed[:3]
    assert {one[0] for one in labels} == {OLD_NAMES.get(rung.kernel, rung.kernel) for rung in ladder()}


# (profile, published shape): predicted seconds and peak bytes at 58067ee.
FIGURES = {
    ("h200", "1"): (6.306403786203912e-05, 10_778_624),
    ("h200", "2"): (4.0300000000000004e-05, 2_787_392),
    ("h200", "7"): (3.035248769892948e-05, 2_253_312),
    ("h200", "6"): (0.004020366877514975, 1_313_110_016),
    ("a100-80", "1"): (0.00011044160440083106, 10_777_600),
    ("a100-80", "2"): (4.63e-05, 2_782_272),
    ("a100-80", "7"): (4.410596089950478e-05, 2_252_032),
    ("a100-80", "6"): (0.009323469209277287, 1_313_108_992),
    ("rtx4090", "1"): (0.00016376653115560052, 19_166_464),
    ("rtx4090", "2"): (0.00016376653115560052, 2_651_140),
    ("rtx4090", "7"): (4.4154956229584926e-05, 4_349_440),
    ("rtx4090", "6"): (0.015060603951949237, 1_313_108_992),
    ("rtx5090", "1"): (0.00017102029894311728, 19_166_464),
    ("rtx5090", "2"): (0.00017102029894311728, 2_651_140),
    ("rtx5090", "7"): (4.575286643184704e-05, 4_349_440),
    ("rtx5090", "6"): (0.011781676377764864, 1_313_108_992),
}


@pytest.mark.parametrize(("profile", "name"), FIGURES, ids=str)
def test_predictions_and_bytes_are_what_they_were(root, profile, name):
    (shape,) = [shape for shape in load_shapes(root / "shapes" / "published.csv") if shape.id == name]
    spec, device = get_family("resident"), load_profile(profile)
    seconds, size = FIGURES[profile, name]
    assert spec.predict_s(shape, device) == pytest.approx(seconds, rel=1e-9)
    assert spec.peak_bytes(shape, device) == size


def test_an_h200_takes_the_kernels_that_were_measured_ahead(root):
    found = {shape.id: kernel(shape) for shape in in_limits(root)}
    rowblocks = dict.fromkeys(["2", "3", "4", "12", "n1", "n3", "n24"], "rowblocks")
    rowwarps = dict.fromkeys(["7", "n2", "n9", "n11", "n17", "n18"], "rowwarps")  # up to 64 wide
    assert found == dict.fromkeys(found, "warpgroups") | rowblocks | rowwarps
    assert {"1", "5", "6", "9", "10", "11"} < set(found) - set(rowblocks | rowwarps)


def test_row_warps_go_before_row_blocks_where_rows_or_sequences_are_thin():
    both = Shape("a", 4, 128, 64, 2, 64, 4, True)
    assert kernel(both) == "rowblocks"
    assert kernel(replace(both, d_model=32)) == "rowwarps"
    assert kernel(replace(both, seq_len=32)) == "rowwarps"
    assert kernel(replace(both, seq_len=32, d_model=128)) == "rowblocks"
    assert kernel(replace(both, d_model=16, num_heads=1)) == "rowblocks", "no pairs, not measured"


def test_every_kernel_passed_over_has_a_reason_of_one_line():
    """Small causal batches of one wide head stay with Triton's flagged rows."""
    choice = choose(Shape("a", 4, 128, 128, 1, 128, 4, True), H200)
    assert choice.explain() == [
        "rowblocks: takes heads of 16, 32, 64 columns, not 128",
        "rowwarps: d_model 128 is over 64: every warp would read all weights for 16 rows",
        "flagged rows: takes the shape",
    ]
    assert get_family("resident").explain(PUBLISHED, load_profile("h200"))[-1] == "warpgroups: takes the shape"
    for shape, room in drawn_shapes(300):
        choice = choose(shape, room)
        before = [rung.kernel for rung in ladder()[: ladder().index(type(choice.config))]]
        assert [name for name, _ in choice.passed_over] == before
        assert all(reason and "\n" not in reason for _, reason in choice.passed_over)


@pytest.mark.parametrize("room", [CONSUMER, replace(H200, sm90=False)], ids=["consumer", "no-compiler"])
def test_other_devices_keep_triton(root, room):
    for shape in in_limits(root):
        assert not isinstance(choose(shape, room).config, Sm90Config)


def test_a_width_no_tensor_core_divides_keeps_triton():
    assert kernel(Shape("odd", 64, 128, 36, 2, 64, 2, True)) == "halves"


def test_planning_loads_neither_torch_nor_triton():
    code = (
        "import sys; from rooflane.families.resident.spec import SPEC; "
        "cases = list(SPEC.kernel_cases()); print(len(cases), {'torch', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["77", "set()"], "14 Triton configurations on 4 architectures, 21 in CUDA C++"


def test_a_cpu_interprets_triton_alone():
    room = building.room_of(torch.device("cpu"))
    assert not room.sm90 and (room.units, room.shared_bytes) == (H200.units, H200.shared_bytes)


@pytest.mark.parametrize(
    ("capability", "compiler", "expected"),
    [((9, 0), True, True), ((9, 0), False, False), ((10, 0), True, False), ((8, 9), True, False)],
)
def test_a_gpus_room_asks_for_its_capability_and_the_compiler(monkeypatch, capability, compiler, expected):
    class Properties:
        major, minor = capability
        multi_processor_count, shared_memory_per_block_optin = 78, 227 * 1024

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    monkeypatch.setattr(building, "missing_compiler", lambda: "" if compiler else "ImportError: none here")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert building.room_of(torch.device("cuda", 0)) == Room(78, 227 * 1024, expected)
    # Only a device that would have run them is warned of.
    named = [str(one.message) for one in warned if "none here" in str(one.message)]
    assert len(named) == len(warned) == int(capability == (9, 0) and not compiler)


def test_operands_follow_the_model_or_the_request(monkeypatch):
    """What the builder hands on, with a device that is said to be an H200 and nothing launched."""
    seen = []
    monkeypatch.setattr(building, "room_of", lambda device: H200)
    monkeypatch.setattr(building, "build_configured", lambda *arguments: seen.append(arguments[2]))
    for dtype in ("float32", "float16", "bfloat16"):
        get_family("resident").build(None, replace(PUBLISHED, dtype=dtype), "cuda")
    get_family("resident").build(None, PUBLISHED, "cuda", "bfloat16")
    assert seen == [torch.float16, torch.float16, torch.bfloat16, torch.bfloat16]
    with pytest.raises(ValueError, match="accepted: float16, bfloat16"):
        get_family("resident").build(None, PUBLISHED, "cuda", "float8")


@pytest.mark.parametrize("seq_len", [17, 32, 100, 128])
def test_scratch_is_bounded_by_the_device_and_not_the_batch(seq_len):
    held = []
    for batch in range(1, 300):
        config = choose(Shape("a", batch, seq_len, 128, 4, 128, 4), H200).config
        held.append(config.scratch_words * 4 + config.flags * 4)
    # A block of 16 rows a multiprocessor, four layers, keys and values of 128 columns, two bytes each; 16 flags each.
    assert 0 < max(held) <= H200.units * (4 * 16 * 128 * 2 * 2 + 16 * 4)
    assert held[-1] == 0
