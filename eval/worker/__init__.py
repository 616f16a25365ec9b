"""What runs in a worker process: arms, the judge, timed windows and clocks."""
