"""What the resident family says of shapes and devices: refusals, predictions, bytes, the kernel that serves."""

from __future__ import annotations

import pytest

from rooflane.families import get_family
from rooflane.shapes import Shape


class Device:
    kind, capability, shared_memory_bytes, units = "cuda", (9, 0), 227 * 1024, 132


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seq_len": 129}, "seq_len 129"),
        ({"d_model": 256}, "d_model 256"),
        ({"ffn_dim": 513}, "ffn_dim 513"),
    ],
)
def test_refusals_say_what_is_over(changes, reason):
    sizes = {"batch_size": 1, "seq_len": 128, "d_model": 128, "num_heads": 4, "ffn_dim": 512, "num_layers": 1}
    spec = get_family("resident")
    assert spec.supports(Shape("a", **sizes), Device()) is None
    assert reason in spec.supports(Shape("a", **{**sizes, **changes}), Device())


def test_refuses_a_cpu_and_old_or_small_devices():
    spec, shape = get_family("resident"), Shape("a", 1, 8, 16, 1, 16, 1)

    class Cpu(Device):
        kind = "cpu"

    class Turing(Device):
        capability = (7, 5)

    class Small(Device):
        shared_memory_bytes = 64 * 1024

    assert "GPU" in spec.supports(shape, Cpu())
    assert "8.0" in spec.supports(shape, Turing())
    assert "99 KiB" in spec.supports(shape, Small())
