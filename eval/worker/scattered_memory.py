"""Where a process's buffers lie in GPU memory, drawn anew for each.

What else holds memory, and what was taken before, moves a call by some tenths of a percent (H200; briefs/process.md).
Processes that all allocate alike would share one draw of that, and their spread would not show it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from random import Random

import torch

# Memory comes in pages of this size.
PAGE_BYTES = 2 << 20
# Enough holes for every buffer of a shape, in 1/64 of the memory at most, half of which stays taken.
BLOCKS = 48
SHARE = 64


class ScatteredMemory:
    """Holds blocks of random sizes with as many holes between them, into which later buffers fall, until `release`.

    Taken from the driver, so that no allocator's statistics count them. `allocate` and `free` stand for its calls.
    """

    def __init__(
        self, seed: str, total_bytes: int, allocate: Callable[[int], int], free: Callable[[int], object]
    ) -> None:
        draw = Random(seed)
        self._free = free
        self._held: list[int] = []
        pages = total_bytes // SHARE // BLOCKS // PAGE_BYTES
        if not pages:
            return
        try:
            for _ in range(BLOCKS):
                self._held.append(allocate(draw.randint(1, pages) * PAGE_BYTES))
        except MemoryError:  # nothing to spare: left as it is
            self.release()
            return
        draw.shuffle(self._held)
        while len(self._held) > BLOCKS // 2:
            free(self._held.pop())

    def release(self) -> None:
        """Give the blocks back."""
        while self._held:
            self._free(self._held.pop())


def scatter_memory(seed: str) -> ScatteredMemory | None:
    """Scatter the current GPU's memory by a seed; None where the driver's library is not found."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        take, give = driver.cuMemAlloc_v2, driver.cuMemFree_v2
    except (OSError, AttributeError):
        return None
    take.argtypes, give.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t), (ctypes.c_uint64,)

    def allocate(size: int) -> int:
        address = ctypes.c_uint64()
        if take(ctypes.byref(address), size):
            raise MemoryError
        return address.value

    # Makes the device's context current, without which the driver has nothing to take memory from.
    torch.cuda.synchronize()
    # All of it and not what is free: a seed means the same whoever else has begun.
    return ScatteredMemory(seed, torch.cuda.mem_get_info()[1], allocate, give)
