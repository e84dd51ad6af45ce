"""Translates a large text with any number of processes on any number of machines that share a folder.

The text is divided into shards of lines. A process locks a shard, translates it, and writes it whole or not at all. The
lock ends with the process, so that another process takes the shard of one that has died. The first process to find all
shards complete joins them. Until then they are in a folder beside the output, with a manifest of what they depend on.
"""

import glob
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby, islice
from pathlib import Path

from data_module.corpus.pairs import fingerprint
from data_module.errors import InputError
from data_module.system.files import FileLock, PlainValues, atomic_file, read_json, remove_temporary_files
from data_module.system.outputs import followed
from data_module.system.text_files import num_lines, open_file
from pipeline.inference.text_io import CHUNK, sentences
from pipeline.runtime.console import report
from pipeline.runtime.launch import clear_failure_count

MANIFEST = "manifest.json"
_LOCK = "lock"
_REPORT_SECONDS = 30.0
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Task:
    """A text to translate, as all of its processes see it."""

    source: Path
    """The file of the text."""
    output: Path
    """The file of all translations."""
    shard_lines: int
    """Number of lines of a shard: a multiple of `CHUNK`, so that lines are batched as by a single process."""
    options: PlainValues
    """Options that the translations depend on; with `n_best`, a line may have several translations."""
    num_processes: int = 1
    """Number of processes of this command; other commands may work on the same task."""
    is_private: bool = False
    """Whether both files are temporary ones of this command, which messages do not name."""


class Shards:
    """The shards of a text, of which this process takes some."""

    def __init__(self, task: Task, model: Path, number: int = 0) -> None:
        """Write the manifest, or compare it with that of an earlier process.

        `model` is the file of the model, `number` that of this process in its command, from 0.

        Raises InputError if the text cannot be read twice, existing shards belong to another text, model or options, or
        the file at `output` has another number of lines.
        """
        source, self._size = task.source, task.shard_lines
        if self._size < 1 or self._size % CHUNK:
            raise InputError(f"--shard-lines {self._size}: must be a multiple of {CHUNK}")
        if not source.is_file():
            raise InputError(f"{source}: is a pipe; --output needs a text file that can be read again")
        with open_file(source) as stream:
            self._num_lines = num_lines(stream)
        self._task, self._source, self._output, self._number = task, source, task.output, number
        self._folder = task.output.with_name(f"{task.output.name}.shards")
        self._names = [f"{shard:07}" for shard in range(-(-self._num_lines // self._size))]
        text, weights = (fingerprint(str(path), path)["sha256"] for path in (source, model))
        of_text = {"text": text, "lines": self._num_lines, "model": weights, "shard_lines": self._size}
        self._begin({**of_text, **task.options})
        self._locks: dict[int, FileLock] = {}
        self._texts: list[str] = []
        self._began = self._reported = time.monotonic()
        self._done_before = self._num_done()

    def _begin(self, wanted: PlainValues) -> None:
        path = self._folder / MANIFEST
        if self._output.exists() and not path.exists():
            raise InputError(f"{self._output}: exists already; remove it, or give another --output")
        with FileLock(self._folder / _LOCK) as lock:
            lock.take(wait=True)
            if not path.exists():
                with atomic_file(path) as file:
                    file.write(json.dumps(wanted, indent=1).encode())
        if (found := read_json(path)) is None:
            raise InputError(f"{path}: is damaged; remove {self._folder} to start over")
        names = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
        if names:
            raise InputError(
                f"{self._folder}: was begun with another {', '.join(names)} (see {MANIFEST}); repeat that command, "
                "give another --output, or remove the folder to start over"
            )
        if self._output.exists():
            self._require_lines(self._output, self._num_lines, "or give another --output")

    def runs(self) -> Iterator[tuple[int, Iterator[str]]]:
        """Yield lines of this process's shards, and the number of the first, until the output exists.

        Each item has consecutive shards, up to one that another process has taken. Pass the translations of all its
        lines to `write` before taking the next item.

        Raises InputError if the text has changed, or a shard has another number of lines than its part of the text.
        """
        order = self._order()
        while not self._output.exists():
            done = self._entries()
            missing = [shard for shard in order if self._names[shard] not in done]
            if (shard := next(filter(self._take, missing), None)) is not None:
                first = shard * self._size + 1
                with open_file(self._source) as stream:
                    name = "" if self._task.is_private else str(self._source)
                    yield first, sentences(self._lines(stream, shard), name, first)
            elif missing:
                time.sleep(_POLL_SECONDS)
                self._report()
            else:
                self._join()
        for name in self._names:
            for path in (self._folder / name, self._folder / f"{name}.lock"):
                path.unlink(missing_ok=True)
        (self._folder / _LOCK).unlink(missing_ok=True)
        remove_temporary_files(self._folder, MANIFEST, "[0-9]*")
        if not self._task.is_private:
            self._say(f"has the translations of all {self._num_lines:,} lines")

    def _order(self) -> list[int]:
        """Return the shards in the order in which this process tries to take them.

        Processes and tasks of a job array begin at different places, so that each takes many consecutive shards.
        """
        place = int(os.environ.get("SLURM_ARRAY_TASK_ID", 0)) - int(os.environ.get("SLURM_ARRAY_TASK_MIN", 0))
        place = place * self._task.num_processes + self._number
        num_places = int(os.environ.get("SLURM_ARRAY_TASK_COUNT", 1)) * self._task.num_processes
        start = len(self._names) * place // num_places
        return sorted(range(len(self._names)), key=lambda shard: (shard < start, shard))

    def _say(self, message: str) -> None:
        """Print one line about all shards, unless another process of the same command does so."""
        if self._number == 0:
            name = "" if self._task.is_private else f"{self._output}: "
            report(f"{name}{message}")

    def write(self, number: int, text: str) -> None:
        """Add the translations of a line, each with a line feed; after the last line of a shard, write the shard."""
        self._texts.append(text)
        shard = (number - 1) // self._size
        if len(self._texts) < self._num_lines_of(shard):
            return
        with atomic_file(self._folder / self._names[shard]) as file:
            file.write("".join(self._texts).encode())
        self._texts.clear()
        self._release(shard)
        clear_failure_count()
        self._report()

    def _report(self) -> None:
        """Print one line about the shards of all processes, at most every `_REPORT_SECONDS`."""
        now = time.monotonic()
        if now - self._reported < _REPORT_SECONDS:
            return
        self._reported, done = now, self._num_done()
        rate = (done - self._done_before) / (now - self._began)
        left = timedelta(seconds=int((self._num_lines - done) / rate)) if rate else "unknown"
        share = f"{done:,} of {self._num_lines:,} lines ({done / self._num_lines:.0%})"
        self._say(f"{share}, {rate:,.0f} lines/s, time left {left}")

    def _take(self, shard: int) -> bool:
        """Lock a shard, unless another process holds it or it is done; return whether it is locked."""
        path = self._folder / self._names[shard]
        lock = FileLock(path.with_suffix(".lock"))
        if not lock.take():
            lock.close()
            return False
        self._locks[shard] = lock
        if path.exists() or self._output.exists():  # Shards are removed once the output exists.
            self._release(shard)
            return False
        return True

    def _release(self, shard: int) -> None:
        (self._folder / self._names[shard]).with_suffix(".lock").unlink(missing_ok=True)
        self._locks.pop(shard).close()

    def _lines(self, stream: Iterable[bytes], shard: int) -> Iterator[bytes]:
        """Yield the lines of a shard that this process has taken, and of the shards after it that it can take."""
        lines = iter(stream)
        deque(islice(lines, shard * self._size), maxlen=0)
        while True:
            left = self._num_lines_of(shard)
            for line in islice(lines, left):
                left -= 1
                yield line
            if left:
                raise InputError(f"{self._source}: has become shorter; restore the text, or give another --output")
            shard += 1
            if shard == len(self._names) or not self._take(shard):
                return

    def _join(self) -> None:
        """Write the output from all shards, unless another process has done it."""
        with FileLock(self._folder / _LOCK) as lock:
            lock.take(wait=True)
            if self._output.exists():
                return
            output = followed(self._output)
            remove_temporary_files(output.parent, glob.escape(output.name))
            with atomic_file(output) as file:
                for shard, name in enumerate(self._names):
                    path = self._folder / name
                    self._require_lines(path, self._num_lines_of(shard), "and run the same command again")
                    file.write(path.read_bytes())

    def _require_lines(self, path: Path, expected: int, way_out: str) -> None:
        """Raise InputError if a file does not have the translations of `expected` lines."""
        with path.open("rb") as lines:
            if self._task.options["n_best"] is None:
                found = sum(1 for _ in lines)
            else:
                # With --n-best, a translation begins with the number of its line.
                found = sum(1 for _ in groupby(lines, lambda line: line.partition(b"\t")[0]))
        if found != expected:
            raise InputError(f"{path}: has {found:,} lines for {expected:,}; remove it, {way_out}")

    def _num_lines_of(self, shard: int) -> int:
        return min(self._size, self._num_lines - shard * self._size)

    def _entries(self) -> set[str]:
        return {entry.name for entry in self._folder.iterdir()}

    def _num_done(self) -> int:
        """Return the number of lines of the shards that are done."""
        done = self._entries()
        return sum(self._num_lines_of(shard) for shard, name in enumerate(self._names) if name in done)
