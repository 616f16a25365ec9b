"""Start the command line: `python -m rooflane.eval`."""

from rooflane.eval.cli import main

main()
