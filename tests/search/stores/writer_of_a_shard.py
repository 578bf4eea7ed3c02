"""Exports the shards of an index in processes of their own, all at the same moment; prints what each did.

Arguments: the index, how many shards, a folder where the processes wait for each other, and the destinations.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

# What is large is imported once, before the processes part; LanceDB itself has threads at once.
import lance_namespace  # noqa: F401
import pyarrow.dataset  # noqa: F401

from offsphere.data.shard import Shard
from offsphere.search.export import export
from offsphere.search.index import Index
from offsphere.search.sources import IndexedDocuments

AT_ONCE = 25


def write(index: str, shard: Shard, meeting: Path, targets: list[str]) -> None:
    source = IndexedDocuments(Index.open(index), shard=shard)
    (meeting / f"{shard.number}.there").touch()
    while len(list(meeting.glob("*.there"))) < shard.count:
        time.sleep(0.01)
    done = export(source, targets, at_once=AT_ONCE)
    (meeting / f"{shard.number}.json").write_text(json.dumps([row.to_dict() for row in done]), encoding="utf-8")


def main(index: str, count: str, meeting: str, *targets: str) -> None:
    shards = [Shard(number, int(count)) for number in range(1, int(count) + 1)]
    processes = []
    for shard in shards:
        if process := os.fork():
            processes.append(process)
            continue
        write(index, shard, Path(meeting), list(targets))
        os._exit(0)
    assert [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes] == [0] * len(shards)
    said = [json.loads((Path(meeting) / f"{shard.number}.json").read_text(encoding="utf-8")) for shard in shards]
    print(json.dumps(said))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
