"""Which run file is whose: the systems behind files and folders, with one run file a collection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offsphere.errors import DataError, UsageError

SUFFIX = ".trec"


@dataclass
class System:
    """What is compared.

    Attributes:
        name: What results call it.
        folder: Where its files are.
        files: Collection to run file.
    """

    name: str
    folder: Path
    files: dict[str, Path] = field(default_factory=dict)


def find_systems(runs: Sequence[Path | str], collections: Sequence[str]) -> list[System]:
    """The systems that these files and folders hold, in the order given, each with a run file for every collection.

    A run file is named ``SYSTEM-COLLECTION.trec``, as ``compare`` and ``evaluate`` name theirs; with one collection
    any file will do, and its name is the system's. A folder, or its ``runs`` folder where it has one, stands for all
    its files of these collections, by name. Systems of one name in several folders are called ``FOLDER/SYSTEM``.

    Args:
        runs: Files and folders.
        collections: Names of the collections.

    Raises:
        DataError: If there is no such file or folder, a folder holds no run of these collections, a file belongs to
            none of several, or a system has no run, or two, for a collection.
        UsageError: If there are less than two systems.
    """
    systems: dict[tuple[Path, str], System] = {}
    for given in map(Path, runs):
        for file in _files(given, collections):
            name, collection = _parts(file, collections)
            system = systems.setdefault((file.parent.resolve(), name), System(name, file.parent))
            if system.files.setdefault(collection, file).resolve() != file.resolve():
                raise DataError(f"{system.files[collection]} is also a run of {name} on {collection}; give one", file)
    for system in systems.values():
        if missing := [name for name in collections if name not in system.files]:
            raise DataError(
                f"no run of {system.name} on {', '.join(missing)}; expected {system.name}-{missing[0]}{SUFFIX} among "
                "the files given, or a --data without it",
                system.folder,
            )
    if len(systems) < 2:
        found = ", ".join(system.name for system in systems.values()) or "none"
        raise UsageError(f"a comparison needs two systems or more, found {found}; give a second run file or folder")
    return _named_apart(list(systems.values()))


def _files(given: Path, collections: Sequence[str]) -> list[Path]:
    if given.is_file():
        return [given]
    if not given.is_dir():
        raise DataError("no such run file or folder of run files", given)
    folder = given / "runs" if (given / "runs").is_dir() else given
    files = sorted(file for file in folder.glob(f"*{SUFFIX}") if _collection_of(file, collections))
    if not files:
        raise DataError(f"no run file of {', '.join(collections)}; expected SYSTEM-{collections[0]}{SUFFIX}", folder)
    return files


def _collection_of(file: Path, collections: Sequence[str]) -> str | None:
    """The collection that the name of the file ends with; of several the longest, as "xquad-en" before "en"."""
    named = [one for one in collections if file.name.endswith(f"-{one}{SUFFIX}")]
    return max(named, key=len, default=None)


def _parts(file: Path, collections: Sequence[str]) -> tuple[str, str]:
    collection = _collection_of(file, collections)
    if collection is not None:
        return file.name.removesuffix(f"-{collection}{SUFFIX}"), collection
    if len(collections) > 1:
        raise DataError(
            f"cannot tell which collection this is a run of: with several, the name must end in one of "
            f"{', '.join(f'-{name}{SUFFIX}' for name in collections)}",
            file,
        )
    return file.name.removesuffix(SUFFIX), collections[0]


def _named_apart(systems: list[System]) -> list[System]:
    counts = Counter(system.name for system in systems)
    for system in systems:
        if counts[system.name] > 1:
            folder = system.folder.parent if system.folder.name == "runs" else system.folder
            system.name = f"{folder}/{system.name}"
    return systems
