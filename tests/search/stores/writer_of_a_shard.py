"""Exports one shard of an index, at the same moment as the writers of the other shards.

Arguments: the index, the shard, a folder where the writers wait for each other, and the destinations.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from offsphere.data.shard import Shard
from offsphere.search.export import export
from offsphere.search.index import Index
from offsphere.search.sources import IndexedDocuments

AT_ONCE = 25


def main(index: str, named: str, meeting: str, *targets: str) -> None:
    shard = Shard.parse(named)
    source = IndexedDocuments(Index.open(index), shard=shard)
    (Path(meeting) / str(shard.number)).touch()
    while len(list(Path(meeting).iterdir())) < shard.count:
        time.sleep(0.01)
    done = export(source, targets, at_once=AT_ONCE)
    print(json.dumps([row.to_dict() for row in done]))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
