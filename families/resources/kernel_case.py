"""Kernels as they ship, for the resource gate: a case is one kernel compiled one way for one architecture. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """Limits of one multiprocessor (CUDA programming guide, compute capabilities)."""

    number: int
    shared_bytes: int
    threads: int
    blocks: int


PROGRAM_BYTES = 1024  # shared memory the system takes of each program

ARCHITECTURES = [
    Architecture(80, 164 * 1024, 2048, 32),
    Architecture(89, 100 * 1024, 1536, 24),
    SM90 := Architecture(90, 228 * 1024, 2048, 32),
    Architecture(120, 100 * 1024, 1536, 32),
]


@dataclass(frozen=True)
class KernelCase(ABC):
    """One kernel compiled one way; its `key` names it in the record."""

    name: str
    architecture: Architecture

    @property
    def key(self) -> str:
        """The kernel's name in the record."""
        return f"{self.name} | sm_{self.architecture.number}"

    @property
    @abstractmethod
    def warps(self) -> int:
        """Warps of a program."""


@dataclass(frozen=True)
class TritonCase(KernelCase):
    """A Triton kernel; `load` returns its function, which imports Triton."""

    load: Callable[[], Any]
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int

    @property
    def warps(self) -> int:
        return self.num_warps


@dataclass(frozen=True)
class CudaCase(KernelCase):
    """A CUDA C++ kernel: its translation unit and its launch."""

    source: str
    threads: int
    shared_bytes: int

    @property
    def warps(self) -> int:
        return self.threads // 32
