"""Runs the program that is its argument: `python -m tests.run_code PROGRAM ...`."""

import sys

exec(compile(sys.argv.pop(1), "program", "exec"), {"__name__": "__main__"})
