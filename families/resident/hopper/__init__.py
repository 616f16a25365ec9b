"""The resident forward in CUDA C++ for compute capability 9.0, compiled at first use."""
