"""What each figure of `rooflane probe --hierarchy` is: its kernel, its unit, and its value predicted for an H200.

Predictions marked "reported" were published for an H100, whose multiprocessor is the same; "a guess" has no source. No
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rooflane.families.resident.sm90_config import translation_unit

MIB, GIB = 1 << 20, 1 << 30
LINE = 128  # bytes of a cache line
WORD = 4
CHUNK = 16  # bytes that a thread reads at once
ROUND = 16  # products of a group
SAMPLES = 4096
MOST_UNITS = 144  # multiprocessors of the largest chip
SCATTER = 0x2545F491  # odd: times it, all places of a power of two are taken once
# 2^x for |x| <= 1/2 by a polynomial whose relative error is at most 7.5e-5.
POLYNOMIAL = {"C0": "0.99992807f", "C1": "0.69326099f", "C2": "0.24261114f", "C3": "0.05517167f"}


@dataclass(frozen=True)
class Order:
    """The places that a pointer chase visits: one every `stride` bytes of `size`, in turn or shuffled."""

    size: int
    stride: int = LINE
    shuffled: bool = False


@dataclass(frozen=True, eq=False)
class Run:
    """One launch of a kernel: `blocks` of it, 0 for one on each multiprocessor.

    The kernel does a thing `repeats` times, which is `steps` dependent steps and `work` (operations, bytes or FLOPs) of
    each block, or with `whole` of the launch. `arguments` follow the repeats, and `samples` is how many steps it times
    one by one. `data` is what it reads: an order, or bytes of zeros. The machine code must have each instruction of
    `expected`, given by the start of its name.
    """

    file: str
    kernel: str
    expected: tuple[str, ...]
    repeats: int
    threads: int = 1024
    blocks: int = 0
    steps: int = 1
    work: float = 0.0
    whole: bool = False
    constants: Mapping[str, int | str] = field(default_factory=dict)
    arguments: tuple[int, ...] = ()
    data: Order | int = WORD
    samples: int = 0
    shared_bytes: int = 0

    @property
    def data_bytes(self) -> int:
        """Bytes that the kernel reads from."""
        return self.data.size if isinstance(self.data, Order) else self.data

    def source(self) -> str:
        """Return the translation unit."""
        return translation_unit(self.file, self.constants, "rooflane.families.ladder.hierarchy")


@dataclass(frozen=True)
class Probe:
    """A figure: its unit says how it is reckoned from a run (`rooflane.eval.device.hierarchy.reckon`).

    `mode` "near" or "far" takes the lower or the upper mode of the steps that are timed one by one. A probe without a
    run is a figure that the profile has under the name `profile`.
    """

    name: str
    unit: str
    predicted: float
    reason: str
    run: Run | None
    mode: str = ""
    profile: str = ""


def _issue(operation: str, instruction: str, steps: int = 0) -> Run:
    """Return the run of one chain in a warp, or with `steps` a round of four a thread on all multiprocessors."""
    one = not steps
    steps, chains = (128, 1) if one else (steps, 4)
    threads, blocks = (32, 1) if one else (1024, 0)
    constants = {"OPERATION": operation, "STEPS": steps, "CHAINS": chains, **POLYNOMIAL}
    work = threads * chains * steps
    return Run("issue.cu", "issue", (instruction,), 8192 // steps, threads, blocks, steps, work, constants=constants)


def _chase(order: Order, cached: bool = False) -> Run:
    """Return the run of a pointer chase: through a cache walked once before, or through memory that no cache holds."""
    places = order.size // order.stride
    warm, repeats, samples = (places, 65536, SAMPLES) if order.size < GIB else (0, min(places, 16384), 0)
    loads = "LDG.E.64" if cached else "LDG.E.64.STRONG.GPU"
    return Run(
        "chase.cu", "chase", (loads,), repeats, 1, constants={"CACHED": int(cached)},
        arguments=(warm, samples), data=order, samples=samples, shared_bytes=samples * WORD,
    )  # fmt: skip


def _stream(size: int, burst: int, stride: int, scattered: bool = False, repeats: int = 1, own: bool = False) -> Run:
    """Return the run that reads bursts of bytes, one every `stride` of `size`; `own` is a block's, through the L1."""
    bursts = size // stride
    logs = [(count - 1).bit_length() for count in (bursts, burst // CHUNK, stride // CHUNK)]
    return Run(
        "stream.cu", "stream", (f"LDG.E.128.STRONG.{'SM' if own else 'GPU'}",), repeats, 512 if own else 1024,
        work=bursts * burst, whole=not own, constants={"OWN": int(own)},
        arguments=(*logs, SCATTER if scattered else 1), data=size * (MOST_UNITS if own else 1),
    )  # fmt: skip


def _shared(
    kernel: str, instruction: str, stride: int = 1, width: int = 1, cluster: int = 1, store: bool = False
) -> Run:
    """Return a run in shared memory, lanes `stride` times `width` words apart; of a pair of blocks in the other's."""
    constants = {"CLUSTER": cluster, "WIDTH": width, "STORE": int(store)}
    chase = kernel == "shared_chase"
    repeats, threads, blocks = (16384, 32, cluster) if chase else (512, 1024, 0)
    work = 0 if chase else threads * 8 * width * WORD
    return Run(
        "shared.cu", kernel, (instruction,), repeats, threads, blocks, work=work, constants=constants,
        arguments=(stride,), shared_bytes=8192,
    )  # fmt: skip


def _barrier(kernel: str, instruction: str, threads: int, blocks: int, repeats: int = 4096, steps: int = 1) -> Run:
    """Return the run of barriers in a row; a barrier of one cluster has as many blocks as the cluster."""
    constants = {"CLUSTER": max(blocks, 1)}
    return Run("barriers.cu", kernel, (instruction,), repeats, threads, blocks, steps, constants=constants)


def _wgmma(columns: int) -> Run:
    """Return the run of four warpgroups' products of so many columns; of 256, two fill the registers."""
    sums, threads = range(columns // 2), 512 if columns < 256 else 256
    constants = {
        "N": columns, "THREADS": threads, "NAMES": '"' + ", ".join(f"%{i}" for i in sums) + '"',
        "SUMS": ", ".join(f'"+f"(c[{i}])' for i in sums),
        "A_NAME": f'"%{len(sums)}"', "W_NAME": f'"%{len(sums) + 1}"',
    }  # fmt: skip
    work = threads // 128 * ROUND * 2 * 64 * columns * 16
    return Run(
        "tensor.cu", "wgmma_rate", ("HGMMA.64",), 64, threads, work=work, constants=constants,
        shared_bytes=(64 + columns) * LINE,
    )  # fmt: skip


def wgmma_rate(columns: int) -> float:
    """Return the FLOPs a clock of 64 x columns x 16 where the tensor cores or the reads of both operands are the limit.

    The cores do 4,096 FLOPs a clock, and shared memory gives 128 bytes.
    """
    flops, read = 2 * 64 * columns * 16, 2 * 16 * (64 + columns)
    return flops / max(flops / 4096, read / 128)


# Beside the most shared memory the L1 keeps 28 KiB, and a walk round more than it holds never hits.
L1 = _chase(Order(16 << 10, shuffled=True), cached=True)
SMALL, LARGE = (_chase(Order(size * MIB, shuffled=True)) for size in (4, 40))
SIGNAL = _barrier("signal", "SYNCS", 1, 2, steps=2)
CLOCK = "SM clock"
CYCLES, BYTES, RESULTS, FLOPS = "cycles", "B/clk/SM", "op/clk/SM", "FLOP/clk/SM"
CHASED, RATED = "shared_chase", "shared_rate"
DEPENDENT = "dependent steps of one warp"
ISSUED = "32 warps of four chains"
SHUFFLED = "dependent loads of shuffled lines"
NARROW = "the slower of the cores and of reading both operands"

PROBES = (
    Probe(CLOCK, "GHz", 1.98, "the highest clock of an H200", LARGE),
    Probe("multiply-add latency", CYCLES, 4, f"{DEPENDENT}; reported", _issue("multiply_add", "FFMA")),
    Probe("multiply-add rate", RESULTS, 126, f"{ISSUED}; 128 less the loop's own", _issue("multiply_add", "FFMA", 64)),
    Probe("exp2 latency", CYCLES, 18, f"{DEPENDENT}; a guess", _issue("exp2_unit", "MUFU.EX2")),
    Probe("exp2 rate", RESULTS, 16, f"{ISSUED}; programming guide", _issue("exp2_unit", "MUFU.EX2", 64)),
    Probe(
        "exp2 by polynomial rate", RESULTS, 18, f"{ISSUED}; 7 instructions of 128 a clock",
        _issue("exp2_polynomial", "FFMA", 16),
    ),
    Probe(
        "exp2 half by polynomial rate", RESULTS, 30, f"{ISSUED}; 32 where both units are always busy",
        _issue("exp2_half", "MUFU.EX2", 16),
    ),
    Probe("shared latency", CYCLES, 29, "a dependent load a lane, no conflict; reported", _shared(CHASED, "LDS")),
    Probe("shared latency, 2-way conflict", CYCLES, 30, "one more pass", _shared(CHASED, "LDS", 2)),
    Probe("shared latency, 32-way conflict", CYCLES, 60, "31 more passes", _shared(CHASED, "LDS", 32)),
    Probe("shared read", BYTES, 128, "32 banks of 4 bytes", _shared(RATED, "LDS")),
    Probe("shared read, 16 bytes a lane", BYTES, 128, "32 banks of 4 bytes", _shared(RATED, "LDS.128", width=4)),
    Probe("shared read, 2-way conflict", BYTES, 64, "128 in two passes", _shared(RATED, "LDS", 2)),
    Probe("shared read, 32-way conflict", BYTES, 4, "128 in 32 passes", _shared(RATED, "LDS", 32)),
    Probe("other block's shared latency", CYCLES, 200, "two moves in it; 180 to 213 reported", _shared(
        CHASED, "LD.E", cluster=2)),
    Probe("other block's shared read", BYTES, 20, "like L2 traffic; 5 reported", _shared(RATED, "LD.E", cluster=2)),
    Probe("other block's shared write", BYTES, 21, "reported", _shared(RATED, "ST.E", cluster=2, store=True)),
    Probe("L1 latency", CYCLES, 40, f"{SHUFFLED} of 16 KiB; reported", L1),
    Probe("L1 read", BYTES, 120, "64 KiB a block, again and again; 128 at best", _stream(
        64 << 10, LINE, LINE, repeats=256, own=True)),
    Probe("L2 latency, 4 MiB", CYCLES, 270, f"{SHUFFLED}; 263 reported", SMALL),
    Probe("L2 latency, 4 MiB, near", CYCLES, 230, "loads timed one by one, the lower mode", SMALL, "near"),
    Probe("L2 latency, 4 MiB, far", CYCLES, 290, "the upper mode; near if that half keeps copies", SMALL, "far"),
    Probe("L2 latency, 40 MiB", CYCLES, 330, "more than one half of the L2 holds", LARGE),
    Probe("L2 latency, 40 MiB, near", CYCLES, 260, "the lower mode; reported", LARGE, "near"),
    Probe("L2 latency, 40 MiB, far", CYCLES, 440, "the upper mode; 414 to 470 reported", LARGE, "far"),
    Probe("L2 read, 16 MiB", "TB/s", 7.0, "all SMs, in order; 38 B/clk/SM reported at best", _stream(
        16 * MIB, LINE, LINE, repeats=64)),
    Probe("L2 read, 16 MiB, 32-byte bursts scattered", "TB/s", 5.0, "a guess: four times the requests", _stream(
        16 * MIB, 32, 32, True, repeats=32)),
    Probe("memory latency, every 32 bytes in turn", CYCLES, 450, "every other load hits a fetch of 64 bytes", _chase(
        Order(GIB, 32))),
    Probe("memory latency, every line in turn", CYCLES, 650, "480 to 800 reported", _chase(Order(GIB))),
    Probe("memory latency, lines of 1 GiB shuffled", CYCLES, 850, "a new DRAM row and a new page each", _chase(
        Order(GIB, LINE, True))),
    Probe("memory latency, every 2 MiB in turn", CYCLES, 900, "a new page each", _chase(Order(GIB, 2 * MIB))),
    Probe("memory read, in order", "TB/s", 4.3, "1 GiB; a copy moves 4.25", _stream(GIB, LINE, LINE)),
    Probe("memory read, lines scattered", "TB/s", 3.5, "1 GiB; more DRAM rows are opened", _stream(
        GIB, LINE, LINE, True)),
    Probe("memory read, 32-byte bursts scattered", "TB/s", 2.0, "1 GiB; memory is fetched by 64 bytes", _stream(
        GIB, 32, 32, True)),
    Probe("memory read, 32 bytes of each line", "TB/s", 2.1, "64 bytes fetched for 32", _stream(GIB, 32, LINE)),
    Probe("block barrier, 128 threads", CYCLES, 20, "a guess", _barrier("block_barrier", "BAR.SYNC", 128, 1)),
    Probe("block barrier, 1,024 threads", CYCLES, 45, "a guess: 8 warps a scheduler", _barrier(
        "block_barrier", "BAR.SYNC", 1024, 1)),
    Probe("cluster barrier, 2 blocks", CYCLES, 850, "orders memory; 851 reported", _barrier(
        "cluster_barrier", "UCGABAR_WAIT", 256, 2)),
    Probe("cluster barrier, 8 blocks", CYCLES, 900, "as 2 blocks: most of it is the memory barrier", _barrier(
        "cluster_barrier", "UCGABAR_WAIT", 256, 8)),
    Probe("cluster barrier, 2 blocks, relaxed", CYCLES, 200, "one trip between the blocks", _barrier(
        "relaxed_cluster_barrier", "UCGABAR_WAIT", 256, 2)),
    Probe("cluster barrier, 8 blocks, relaxed", CYCLES, 220, "one trip between the blocks", _barrier(
        "relaxed_cluster_barrier", "UCGABAR_WAIT", 256, 8)),
    Probe("signal to a block of the cluster", CYCLES, 500, "a release, an arrival, a wait", SIGNAL),
    Probe("grid barrier", "us", 1.5, "two trips to the L2 and a fence; an A100 takes 1.2", _barrier(
        "grid_barrier", "RED", 256, 0, 512)),
    Probe("kernel launch in a stream", "us", 2.1, "reported", None, profile="kernel_launch"),
    Probe("graph node", "us", 1.0, "measured before", None, profile="graph_node"),
    Probe("graph replay, one node", "us", 10.3, "measured before", None, profile="graph_replay"),
    *(
        Probe(f"wgmma fp16, N = {columns}", FLOPS, round(wgmma_rate(columns)), NARROW, _wgmma(columns))
        for columns in (8, 16, 32, 64, 128, 256)
    ),
    Probe("mma.sync fp16", FLOPS, 2540, "62% of 4,096; reported", Run(
        "tensor.cu", "mma_rate", ("HMMA.16816.F32",), 256, 512, work=16 * ROUND * 2 * 16 * 8 * 16, constants={"N": 0})),
)  # fmt: skip
