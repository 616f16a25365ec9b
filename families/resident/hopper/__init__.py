"""The resident forward on Hopper's warpgroup products (compute capability 9.0), in CUDA C++ compiled at first use."""
