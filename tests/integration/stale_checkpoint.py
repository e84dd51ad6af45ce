"""Run `python -m pipeline` with a rank 1 that finds the oldest checkpoint instead of the newest.

This happens when another job writes a checkpoint while rank 0 waits for that job to end.
"""

import sys

from pipeline.__main__ import main
from pipeline.checkpointing import run_folder
from pipeline.runtime.launch import process_rank

if __name__ == "__main__":
    if process_rank() == 1:
        run_folder.latest_valid = lambda run: (run_folder.step_checkpoints(run)[0], [])
    sys.exit(main())
