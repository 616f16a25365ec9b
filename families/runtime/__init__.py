"""The call path of built forwards: weights, staging, launch and run-time compilation."""
