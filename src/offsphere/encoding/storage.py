"""Where embeddings are kept: one ``embeddings.npy`` in a local folder, or one file a shard at any fsspec address.

What is written is either there whole or not at all: small files are written under another name and renamed, and rows
count only once the manifest has their checksum.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from offsphere.errors import EmbeddingsError

MATRIX = "embeddings.npy"
LOCK = "encode.lock"


class Storage(Protocol):
    """Named small files, and the rows of one matrix."""

    name: str

    def read(self, name: str) -> bytes | None:
        """A small file; None where there is none."""

    def write(self, name: str, content: bytes) -> None:
        """Put a small file in place of the one before, in one step."""

    def prepare(self, shape: tuple[int, int]) -> None:
        """Get ready for a matrix of this shape; rows that are there stay."""

    def write_rows(self, number: int, start: int, rows: np.ndarray) -> None:
        """Store the float32 rows of a shard, which begins at row ``start``, and have the disk confirm it."""

    def read_rows(self, number: int, start: int, stop: int, dimension: int) -> np.ndarray | None:
        """(stop - start, n) float32 rows of a shard; None where some of them are missing."""

    def writing(self) -> Any:
        """A context in which no other process writes here."""


class LocalFolder:
    """A folder of the file system: every row in ``embeddings.npy``, at its place.

    Rows are written with ``pwrite`` and not through a memory map, in which a full disk would end the process.

    Args:
        folder: Made when something is written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.name = str(folder)

    def read(self, name: str) -> bytes | None:
        """See ``Storage``."""
        file = self.folder / name
        return file.read_bytes() if file.is_file() else None

    def write(self, name: str, content: bytes) -> None:
        """See ``Storage``."""
        temporary = self.folder / f"{name}.{os.getpid()}.tmp"
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.folder / name)
        finally:
            temporary.unlink(missing_ok=True)

    def prepare(self, shape: tuple[int, int]) -> None:
        """See ``Storage``. A file of another number of rows keeps its rows: the header has a fixed size.

        Raises:
            EmbeddingsError: If the disk has no room for the matrix.
        """
        header = _header(shape)
        file = self.folder / MATRIX
        needed = len(header) + 4 * shape[0] * shape[1] - (file.stat().st_size if file.exists() else 0)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise EmbeddingsError(
                f"{file} needs {needed / 1e6:,.0f} MB more, and its disk has {free / 1e6:,.0f} MB left; make room, or "
                "give --out on another disk"
            )
        with _opened(file, os.O_RDWR | os.O_CREAT) as opened:
            _write_all(opened, header, 0)
            size = len(header) + 4 * shape[0] * shape[1]
            if os.fstat(opened).st_size > size:
                os.ftruncate(opened, size)

    def write_rows(self, number: int, start: int, rows: np.ndarray) -> None:
        """See ``Storage``."""
        offset = len(_header(rows.shape)) + 4 * start * rows.shape[1]
        with _opened(self.folder / MATRIX, os.O_WRONLY) as file:
            _write_all(file, np.ascontiguousarray(rows, "<f4").tobytes(), offset)
            os.fsync(file)

    def read_rows(self, number: int, start: int, stop: int, dimension: int) -> np.ndarray | None:
        """See ``Storage``."""
        file = self.folder / MATRIX
        if not file.is_file():
            return None
        with file.open("rb") as opened:
            opened.seek(len(_header((stop, dimension))) + 4 * start * dimension)
            content = opened.read(4 * (stop - start) * dimension)
        return _rows(content, stop - start, dimension)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """See ``Storage``. The operating system ends the lock with the process.

        Raises:
            EmbeddingsError: If another process writes here, or nobody may.
        """
        from filelock import FileLock, Timeout

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / LOCK, timeout=0)
            lock.acquire()
        except Timeout:
            raise EmbeddingsError(
                f"another process is encoding into {self.folder}; wait until it ends, then type the same command again"
            ) from None
        except OSError as error:
            raise EmbeddingsError(f"cannot write to {self.folder}: {error}") from error
        try:
            yield
        finally:
            lock.release()


class RemoteFolder:
    """A folder at an fsspec address such as ``s3://bucket/name``: one file a shard, ``shards/NUMBER.npy``.

    Args:
        address: With its protocol. ``file://`` is one as well, such as a file system that machines share.
    """

    def __init__(self, address: str):
        import fsspec  # type: ignore[import-untyped]

        self.name = address
        try:
            self._files, self._path = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise EmbeddingsError(f"cannot open {address}: {error}") from error

    def read(self, name: str) -> bytes | None:
        """See ``Storage``."""
        path = f"{self._path}/{name}"
        return self._files.cat_file(path) if self._files.exists(path) else None

    def write(self, name: str, content: bytes) -> None:
        """See ``Storage``. An object store puts an object whole; a file system is given another name first."""
        path = f"{self._path}/{name}"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        if "file" not in self._protocols:
            self._files.pipe_file(path, content)
            return
        temporary = f"{path}.{os.getpid()}.tmp"
        self._files.pipe_file(temporary, content)
        Path(temporary).replace(path)

    def prepare(self, shape: tuple[int, int]) -> None:
        """See ``Storage``. There is nothing to prepare."""

    def write_rows(self, number: int, start: int, rows: np.ndarray) -> None:
        """See ``Storage``."""
        content = _header(rows.shape) + np.ascontiguousarray(rows, "<f4").tobytes()
        self.write(shard_name(number), content)

    def read_rows(self, number: int, start: int, stop: int, dimension: int) -> np.ndarray | None:
        """See ``Storage``."""
        content = self.read(shard_name(number))
        return None if content is None else _rows(content[len(_header((1, 1))) :], stop - start, dimension)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """See ``Storage``. There are no locks; two commands write the same bytes under the same names."""
        yield

    @property
    def _protocols(self) -> tuple[str, ...]:
        protocol = self._files.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def open_storage(place: str | Path) -> Storage:
    """The storage at a folder, or at an address with a protocol (``s3://...``)."""
    return RemoteFolder(str(place).rstrip("/")) if "://" in str(place) else LocalFolder(Path(place).expanduser())


def shard_name(number: int) -> str:
    """The file of a shard where every shard has its own."""
    return f"shards/{number:06d}.npy"


def checksum(rows: np.ndarray) -> str:
    """The SHA-256, in hexadecimal, of float32 rows as they lie on disk."""
    return hashlib.sha256(np.ascontiguousarray(rows, "<f4").data).hexdigest()


def _header(shape: tuple[int, ...]) -> bytes:
    """The beginning of a .npy file, which NumPy pads so that the first axis can grow in place."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def _rows(content: bytes, count: int, dimension: int) -> np.ndarray | None:
    if len(content) != 4 * count * dimension:
        return None
    return np.frombuffer(content, "<f4").reshape(count, dimension)


@contextmanager
def _opened(file: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(file, flags | getattr(os, "O_BINARY", 0), 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(file: int, content: bytes, offset: int) -> None:
    """Write it all at this place; a disk that fills up takes a part first, and refuses the rest."""
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
