"""What is on disk: runs, records, settings, environment and stored nulls."""
