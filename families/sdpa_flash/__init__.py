"""sdpa_flash: attention that never writes its scores, for attention-dominated shapes."""

from __future__ import annotations

from rooflane.families.lean.spec import LeanSpec


class SdpaFlash(LeanSpec):
    """Use flash attention over packed QKV, so that no `[B, H, S, S]` is stored, and fused ops; SDPA on a CPU."""

    name = "sdpa_flash"
    summary = "flash attention over packed fp16 QKV, fused norms and activations"


SPEC = SdpaFlash()
