"""The fused forward that several families share: operations, kernels and cost."""
