"""graph_compile: the lean forward compiled once and captured into one CUDA graph, for launch-bound shapes."""

from __future__ import annotations

from rooflane.families.lean.spec import LeanSpec


class GraphCompile(LeanSpec):
    """Turn 132 host launches into one graph replay; on a CPU, into one compiled call."""

    name = "graph_compile"
    summary = "torch.compile of the lean forward, captured into one CUDA graph"
    compiles = True


SPEC = GraphCompile()
