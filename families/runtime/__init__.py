"""A built forward and its call path: weights, staging, launch and run-time compilation."""
