"""The memory hierarchy, barriers and instructions of compute capability 9.0, each measured by a kernel of its own."""
