"""Versions of the code and of the packages it runs on."""

import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any


def versions() -> dict[str, Any]:
    """Return the revision of the code, the versions of Python and the main packages, and the host name."""
    packages = ("torch", "lightning", "sentencepiece", "sacrebleu", "numpy")
    here = Path(__file__).resolve().parent
    revision = None
    if shutil.which("git"):
        describe = ["git", "-C", str(here), "describe", "--always", "--dirty"]
        revision = subprocess.run(describe, capture_output=True, encoding="utf-8", check=False).stdout.strip() or None
    return {
        "revision": revision,
        "python": platform.python_version(),
        "host": platform.node(),
        **{name: version(name) for name in packages},
    }
