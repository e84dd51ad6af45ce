"""The work of a process that fails: a module of its own, which a new process imports at once."""

import os
import signal
import time


def work_or_fail(device: str, number: int) -> None:
    """Wait for ever as the first process, and fail as the second as `FAILURE` says."""
    if number == 0:
        time.sleep(3600)
    match os.environ["FAILURE"]:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            raise RuntimeError("DefaultCPUAllocator:\n can't allocate memory: you tried 9 bytes")
        case "full disk":
            raise OSError(28, "No space left on device", "output")
        case "bug":
            raise RuntimeError("a bug")
