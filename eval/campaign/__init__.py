"""What runs in the parent: planning, workers, verification and timing of each shape."""
