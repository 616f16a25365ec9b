"""The rungs of the reductions, task by task, from the slowest on.

A copy on an H200 moves 4.25 TB/s, read and written: a prediction is a share of that.
"""

from __future__ import annotations

from rooflane.families.ladder.rungs import ReduceRung

# Rows in registers: up to 1,024 columns a warp, and 4,096 a block.
HELD = {"threads": 128, "held": 8, "registers": 64, "blocks": 8}
KEYS = HELD | {"registers": 80, "blocks": 6}
PASSES = {"threads": 256, "registers": 32, "blocks": 8, "expected": ("LDG", "SHFL")}


def _sum(name: str, idea: str, predicted: float, reason: str, expected: tuple[str, ...], **more: float) -> ReduceRung:
    file = f"sum_{name.replace(' ', '_')}"
    sizes = {"threads": 256, "registers": 32, "blocks": 8} | more
    return ReduceRung(
        name=f"sum {name}", idea=idea, predicted=predicted, reason=reason, file=f"{file}.cu", kernel=file,
        expected=expected, **sizes,
    )  # fmt: skip


def _rows(task: str, how: str, idea: str, predicted: float, reason: str, **sizes: object) -> ReduceRung:
    file = f"{task}_{how}"
    return ReduceRung(
        name=f"{task} {how}", idea=idea, predicted=predicted, reason=reason, file=f"{file}.cu", kernel=file, task=task,
        **sizes,
    )  # fmt: skip


RUNGS = (
    _sum("atomics", "each thread adds its element to one word", 0.007, "one addition to a word a cycle of the L2",
         ("ATOMG.E.ADD",), per_block=256, bound=1e-3),
    _sum("shared tree", "a block adds in shared memory, then once to memory", 0.8,
         "524,288 atomics on one line, one a cycle of the L2: 0.3 ms", ("LDS", "STS", "BAR"), per_block=256),
    _sum("warp shuffles", "lanes add registers: two barriers a block in place of nine", 0.8,
         "as many atomics: no gain unless the barriers are the limit", ("SHFL", "BAR"), per_block=256),
    _sum("vector loads", "four loads of 16 bytes in flight a thread", 3.6,
         "a sixteenth of the blocks: their atomics hide behind the loads", ("LDG.E.128", "SHFL"), per_block=4096),
    _sum("grid stride", "as many blocks as fit; the last one adds their sums", 4.2, "nothing but loads is left",
         ("LDG.E.EF.128", "SHFL")),
    _rows("softmax", "passes", "three passes, each reads the row again", 2.2, "two more passes from the L1", **PASSES),
    _rows("softmax", "online", "maximum and sum in one pass", 2.4, "one more pass from the L1", **PASSES),
    _rows("softmax", "held", "the row in registers", 3.9, "memory is read once, 16 bytes a load", **HELD,
          expected=("LDG.E.128", "STG.E.128", "MUFU.EX2")),
    _rows("layernorm", "naive", "sums of x and x^2 in one pass", 2.6, "one more pass from the L1", **PASSES,
          bound=1e-3),
    _rows("layernorm", "welford", "mean and squares corrected with each element", 2.0, "a division an element",
          **PASSES | {"registers": 40, "blocks": 6}),
    _rows("layernorm", "held", "two passes over registers", 3.9, "memory is read once, 16 bytes a load", **HELD,
          expected=("LDG.E.128", "STG.E.128", "SHFL")),
    _rows("rmsnorm", "held", "the row in registers", 3.9, "memory is read once, 16 bytes a load", **HELD,
          expected=("LDG.E.128", "STG.E.128", "SHFL")),
    _rows("argmax", "held", "value and place folded together", 3.9, "memory is read once, 16 bytes a load", **KEYS,
          expected=("LDG.E.128", "SHFL"), result="int32"),
)  # fmt: skip
