"""Changes to a file that is only ever replaced whole: each is on disk at once, and all are folded in later."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from offsphere.errors import StoreError

if TYPE_CHECKING:
    import pyarrow
    from filelock import FileLock


class Changes:
    """Numbered Parquet files in ``FILE.changes``: rows that were written, or only ids of rows that were deleted.

    Replaying them in order twice, or from any point on, ends in the same rows, so that whatever ends the process
    loses and doubles nothing. One process at a time changes a file.

    Args:
        file: What the changes are for.
    """

    def __init__(self, file: Path):
        self.file = file
        self.folder = file.with_name(f"{file.name}.changes")
        self._lock_file = file.with_name(f"{file.name}.lock")
        self._lock: FileLock | None = None

    @property
    def held(self) -> bool:
        """Whether this process has the right to change the file."""
        return self._lock is not None

    def begin(self) -> None:
        """Take the right to change the file, until ``end``.

        Raises:
            StoreError: If another process holds it.
        """
        if not self.held and not self.try_begin():
            raise StoreError(f"another process is changing {self.file}; run this again when it has finished")

    def try_begin(self) -> bool:
        """Take the right if no other process holds it; whether it was taken."""
        from filelock import FileLock, Timeout

        self.file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._lock_file)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
        self._lock = lock
        return True

    def end(self) -> None:
        """Give the right back."""
        if self._lock is not None:
            self._lock_file.unlink(missing_ok=True)
            self._lock.release()
            self._lock = None

    def parts(self) -> list[Path]:
        """The files, oldest first."""
        return sorted(self.folder.glob("????????.parquet"))

    def append(self, rows: pyarrow.Table) -> None:
        """Write rows, or a table with no column but ``id`` to delete those; durable once this returns."""
        from pyarrow import parquet

        parts = self.parts()
        number = int(parts[-1].stem) + 1 if parts else 0
        self.folder.mkdir(exist_ok=True)
        with replaced(self.folder / f"{number:08d}.parquet") as temporary:
            parquet.write_table(rows, temporary)

    def latest(self) -> dict[str, int | None]:
        """Per changed id, the place in ``parts`` of its row; None where it was deleted."""
        from pyarrow import parquet

        found: dict[str, int | None] = {}
        for place, part in enumerate(self.parts()):
            deleted = parquet.read_schema(part).names == ["id"]
            ids = parquet.read_table(part, columns=["id"])["id"].to_pylist()
            found.update(dict.fromkeys(ids, None if deleted else place))
        return found

    def rows(self, latest: dict[str, int | None]) -> Iterator[pyarrow.Table]:
        """The rows that hold after all changes, in tables."""
        from pyarrow import parquet

        for place in sorted({place for place in latest.values() if place is not None}):
            rows = parquet.read_table(self.parts()[place])
            yield rows.filter([latest[row] == place for row in rows["id"].to_pylist()])

    def clear(self) -> None:
        """Forget all changes, once they are in the file; oldest first, so that those left over still replay right."""
        for part in self.parts():
            part.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary path whose file takes the place of ``path`` after the block, all of it or nothing, and durably."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    move(temporary, path)


def move(fresh: Path, path: Path) -> None:
    """Put a finished file in the place of another, durably."""
    sync(fresh)
    fresh.replace(path)
    if os.name == "posix":  # elsewhere a folder cannot be opened, and need not be
        sync(path.parent)


def sync(path: Path) -> None:
    """Have a file or folder on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
