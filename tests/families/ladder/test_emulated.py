"""The tensor-core rungs as they are written, run on the CPU by an emulator of their instructions (emulator.hpp)."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from rooflane.families.ladder import tensor_map
from rooflane.families.ladder.gemm.tensor import TENSOR, persistent
from rooflane.families.ladder.launch import _parameter, normwise_error

EMULATOR = Path(__file__).with_name("emulator.hpp")
CPU = torch.device("cpu")
UNITS = 2  # multiprocessors of the device, so that one cluster takes every tile

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the emulator")

# What stands for the functions that are one instruction, by name and number of parameters.
BODIES = {
    "pack": "return emulator::pack(low, high);",
    "copy_chunk": "live ? (void)memcpy(emulator::at(to), from, 16) : (void)memset(emulator::at(to), 0, 16);",
    "end_copy": "",
    "await_copy": "",
    "read_matrices": "emulator::move_matrices(from, to, false);",
    "multiply 4": "emulator::multiply_fragments(c, a, b0, b1);",
    "barrier_init": "auto& one = emulator::barrier(barrier); one.arrivals = one.left = arrivals;",
    "barrier_arrive": "emulator::arrive(emulator::barrier(barrier));",
    "barrier_expect": "emulator::arrive(emulator::barrier(barrier), bytes);",
    "barrier_wait": "emulator::wait([=] { return emulator::barrier(barrier).phase % 2 != (int)parity; });",
    "publish_barriers": "",
    "publish_shared": "",
    "copy_box": "emulator::copy_box(to, &map, depth, row, barrier);",
    "copy_box_to_all": """for (u32 block = 0; block < CLUSTER; block++) {
        const u32 there = block << emulator::BLOCK_BITS, mask = emulator::MASK;
        emulator::copy_box(to & mask | there, &map, depth, row, barrier & mask | there);
    }""",
    "block_rank": "return emulator::current->rank;",
    "sync_cluster": "emulator::meet(emulator::everyone, emulator::threads_of_cluster);",
    "arrive_at_all": """const u32 rank = threadIdx.x % 32;
        if (rank < CLUSTER)
          emulator::arrive(emulator::barrier(barrier & emulator::MASK | rank << emulator::BLOCK_BITS));""",
    "give_registers": "",
    "take_registers": "",
    "await_turn": "emulator::meet(emulator::blocks[emulator::current->rank].named[1 + group], 256);",
    "give_turn": "emulator::arrive_named(emulator::blocks[emulator::current->rank].named[1 + group], 256);",
    # The descriptor's other fields are constants (test_tensor.py).
    "multiply": "emulator::multiply(c, BN, a, w, add, LINE / BK);",
    "begin_products": "",
    "end_products": "emulator::end(emulator::current->open_products, emulator::current->products);",
    "await_products": "emulator::await(emulator::current->products, LEFT);",
    "hold": "",
    "store_matrices": "emulator::move_matrices(to, const_cast<u32*>(words), true);",
    "load_matrices": "emulator::move_matrices(from, words, false);",
    "unpack": "return emulator::unpack(pair);",
    "activate_pair": "return ACTIVATION == 4 ? emulator::gelu_pair(x) : x;",
    "store_box": "emulator::store_box(&map, column, row, from);",
    "end_store": "emulator::end(emulator::current->open_stores, emulator::current->stores);",
    "await_stores": "emulator::await(emulator::current->stores, LEFT);",
    "exp2_fast": "return exp2f(x);",
}


def emulated(source: str) -> str:
    """Return a translation unit for the CPU: the bodies with instructions replaced, shared memory the emulator's."""
    blank = re.sub(r'"(?:\\.|[^"\\])*"', lambda text: " " * len(text[0]), source)
    parts, done = [], 0
    for found in re.finditer(r"__device__ __forceinline__ [^;{]*?(\w+)\(([^;{]*)\) \{", blank):
        depth, end = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(blank[end], 0)
            end += 1
        if "asm" not in blank[found.end() : end]:
            continue
        name, parameters = found[1], found[2].count(",") + 1
        body = BODIES.get(f"{name} {parameters}" if "u32 b0" in found[2] else name)
        assert body is not None, f"{name} has an instruction that the emulator does not know"
        parts += [source[done : found.end()], body, "}"]
        done = end
    text = "".join(parts) + source[done:]
    assert "asm" not in re.sub(r"//.*", "", text)
    shared = "extern __shared__ __align__(1024) unsigned char shared[];"
    assert text.count(shared) == 1
    return text.replace(shared, "unsigned char* shared = emulator::blocks[emulator::current->rank].memory();")


def build(rung, folder: Path) -> ctypes.CDLL:
    file = folder / "rung.cpp"
    file.write_text(
        f'#include "{EMULATOR}"\n{emulated(rung.source())}\n'
        'extern "C" int launch(void** parameters, int grid, int threads, int cluster, unsigned seed) {\n'
        f"return emulator::run(grid, threads, cluster, seed, [=] {{ emulator::call({rung.kernel}, parameters); }});}}\n"
    )
    made = folder / "rung.so"
    command = ["g++", "-std=c++17", "-O2", "-w", "-shared", "-fPIC", str(file), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(made))


def run(rung, library: ctypes.CDLL, inputs: list[torch.Tensor], sizes: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return the output, whose every element was written and nothing beside it."""
    shape, dtype = rung.output_shape(*sizes), getattr(torch, rung.result)
    count = torch.Size(shape).numel()
    whole = torch.full((count + 128,), torch.nan, dtype=dtype)
    out = whole[64 : 64 + count].view(shape)
    values = [_parameter(value) for value in rung.arguments(inputs, out)]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    cluster = getattr(rung, "cluster", 1)
    assert library.launch(pointers, rung.grid(UNITS, *sizes), rung.threads, cluster, seed) == 0, "a deadlock"
    assert bool(whole[:64].isnan().all()) and bool(whole[64 + count :].isnan().all())
    return out


@pytest.fixture(autouse=True)
def maps(monkeypatch):
    """A map is what the emulator reads of it; that of the device is the driver's secret."""
    monkeypatch.setattr(
        tensor_map,
        "encode_map",
        lambda matrix, rows, columns=None: struct.pack(
            "<5Q88x", matrix.data_ptr(), matrix.shape[1], matrix.shape[0], rows, matrix.element_size()
        ),
    )


def check(rung, library: ctypes.CDLL, cases: list[tuple[int, int, int]]) -> None:
    for seed, sizes in enumerate(cases):
        drawn = rung.draw(CPU, *sizes)
        inputs = rung.prepare(drawn)
        out = run(rung, library, inputs, sizes, seed)
        assert normwise_error(rung.value(out), rung.truth(drawn)) <= rung.bound, sizes
        if getattr(rung, "row_sums", False):
            # Of what is stored, before it is rounded.
            exact = inputs[0].double() @ inputs[1].double().T + sum(one.double() for one in drawn[2:])
            wanted = torch.stack([exact.sum(1), exact.square().sum(1)], 1)
            assert normwise_error(inputs[-1].double().sum(0), wanted) <= 1e-5


# Ragged in every size, several tiles in each direction; one row; a ring that goes round within a tile.
SIZES = [(260, 264, 80), (1, 8, 8), (70, 264, 392)]
PLAIN = [rung for rung in TENSOR if rung.operand == "float16" and not getattr(rung, "bias", False)]
EPILOGUES = [
    persistent("ping-pong GELU", 192, "", 1.0, "", pingpong=True, bias=True, activation="gelu"),
    persistent("tanh", 128, "", 1.0, "", cluster=1, bias=True, activation="gelu tanh"),
    persistent("ReLU", 256, "", 1.0, "", bias=True, activation="relu"),
    persistent("norm", 128, "", 1.0, "", pingpong=True, bias=True, norm=True),
    persistent("GELU pairs", 128, "", 1.0, "", pingpong=True, bias=True, norm=True, activation="gelu pairs"),
    persistent("row sums", 128, "", 1.0, "", pingpong=True, bias=True, residual=True, row_sums=True),
    persistent("residual", 256, "", 1.0, "", residual=True),
    persistent("TF32", 128, "", 1.0, "", operand="float32"),
    persistent("FP8", 192, "", 1.0, "", pingpong=True, operand="float8_e4m3fn", bias=True),
    persistent("sums of halves", 256, "", 1.0, "", row_sums=True),
]


@pytest.mark.parametrize("rung", PLAIN, ids=lambda rung: rung.name)
def test_a_rung_computes_the_product(rung, tmp_path):
    check(rung, build(rung, tmp_path), SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("rung", EPILOGUES, ids=lambda rung: rung.name)
def test_an_epilogue_computes_what_it_says(rung, tmp_path):
    check(rung, build(rung, tmp_path), [SIZES[0], (1, 8, 16)])


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        # Consumers free the place of this step, whose products still read it, in place of the one before.
        ("cluster", "before * 8", "place.slot * 8"),
        # The producer does not wait for the neighbour's consumers, whose place it writes too.
        ("cluster", "CONSUMERS * CLUSTER", "CONSUMERS"),
        ("ping-pong", "if (PINGPONG && turn > 0) await_turn(group);", ""),
        ("ping-pong", "await_stores<BOXES - 1>()", "await_stores<BOXES>()"),
        ("wgmma", "AHEAD = STAGES - 2", "AHEAD = STAGES - 1"),
        # The residual's box is asked for before the output that lies in its place has been stored.
        ("row sums", "await_stores<1>();\n        residual.copy", "residual.copy"),
        ("row sums", "await_stores<0>();\n        for", "for"),
    ],
)
@pytest.mark.slow
def test_the_emulator_finds_a_place_that_is_used_too_early(name, right, wrong, tmp_path, monkeypatch):
    (rung,) = (rung for rung in [*PLAIN, *EPILOGUES] if rung.name == name)
    broken = rung.source().replace(right, wrong)
    assert broken != rung.source()
    monkeypatch.setattr(type(rung), "source", lambda self: broken)
    library = build(rung, tmp_path)
    with pytest.raises(AssertionError):
        check(rung, library, [SIZES[2], SIZES[0]] * 2)
