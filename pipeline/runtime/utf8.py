"""Standard streams, files and file names in UTF-8, whatever the locale is."""

import codecs
import locale
import os
import sys

_MODE = "PYTHONUTF8"


def use_utf8() -> None:
    """Start this process anew in Python's UTF-8 mode if the locale or PYTHONIOENCODING is of another encoding.

    Python reads both only when it starts. The processes that this one starts inherit the mode. A file name that is not
    UTF-8 is printed with the bytes that it has.
    """
    streams = [stream for stream in (sys.stdin, sys.stdout, sys.stderr) if stream is not None]
    names = [sys.getfilesystemencoding(), locale.getpreferredencoding(False), *(stream.encoding for stream in streams)]
    if all(codecs.lookup(name).name == "utf-8" for name in names) or os.environ.get(_MODE) == "1":
        return
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environment, _MODE: "1"})
