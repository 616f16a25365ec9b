"""Launch configurations of the resident kernels, chosen by shape; nothing tunes at run time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ResidentConfig:
    """How one resident forward is launched.

    `rows` 0 means the whole kernel with `group` sequences a program; else the rows kernel with that many query rows a
    program and `heads_a_step` heads side by side. `ffn_tile` hidden columns are live at a time.
    """

    rows: int = 0
    group: int = 1
    heads_a_step: int = 1
    ffn_tile: int = 64
    num_warps: int = 8
    num_stages: int = 2
