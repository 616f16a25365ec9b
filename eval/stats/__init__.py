"""What the numbers say: estimators, intervals, verdicts and the figures of a run."""
