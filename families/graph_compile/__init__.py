"""graph_compile: the lean forward compiled once and captured into one CUDA graph, for launch-bound shapes."""

from __future__ import annotations

from rooflane.families.lean.spec import LeanSpec


class GraphCompile(LeanSpec):
    """Replace 132 host launches by one graph replay, or on a CPU by one compiled call."""

    name = "graph_compile"
    summary = "torch.compile of the lean forward, captured into one CUDA graph"
    compiles = True


SPEC = GraphCompile()
