"""The sandbox of a candidate: what it refuses, how, and the trial that proves it. Loads no torch."""
