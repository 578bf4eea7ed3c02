"""The recipes of docs/scale.md that are no commands: the SQL on PostgreSQL, the JSON through Qdrant's own client."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from offsphere.data.shard import Shard
from offsphere.diagnosis.subject import open_bare
from offsphere.search.export import export
from offsphere.search.sources import EncodedDocuments
from offsphere.search.stores.pgvector import SEARCH
from offsphere.search.verify import verify

PAGE = (Path(__file__).parents[3] / "docs" / "scale.md").read_text(encoding="utf-8")
COUNT = 120


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)
    return found


@pytest.mark.parametrize("first", ["1/10", "1/1"])  # a small part before the table is divided, or all of it
def test_a_partitioned_table(first, model, collection, postgres, target, opened):
    import psycopg

    at = target("pgvector")

    def source(shard: str) -> EncodedDocuments:
        return EncodedDocuments(open_bare(model, None, None, "cpu"), [collection], shard=Shard.parse(shard))

    (begun,) = export(source(first), [at])
    with psycopg.connect(postgres, autocommit=True) as sql:
        sql.execute(block("sql"))
        parts = [export(source(f"{number}/3"), [at])[0] for number in (1, 2, 3)]
        assert begun.written + sum(part.written for part in parts) == COUNT  # what was there before is not sent again
        sizes = [sql.execute(f"SELECT count(*) FROM documents_{part}").fetchone()[0] for part in range(4)]
        assert sum(sizes) == COUNT and min(sizes) > 0
        query = SEARCH.format(table="documents", type="vector").replace("%(k)s", "10")
        vector = f"'[{','.join(['1'] * source('1/1').dimension)}]'"
        sql.execute("SET enable_seqscan = off")
        plan = "\n".join(row[0] for row in sql.execute("EXPLAIN " + query.replace("%(query)b", vector)))
        assert "Merge Append" in plan
        assert all(f"using documents_{part}_vector_idx" in plan for part in range(4))
    store = opened(at)
    assert (store.metric(), store.count(), store.stamp()) == ("ip", COUNT, source("1/1").stamp)
    found = verify(at, model, collection, device="cpu")
    assert found.passed and found.overlap == 1.0


def test_the_body_for_a_cluster_is_one_that_the_client_knows():
    from qdrant_client import models

    body = json.loads(block("json"))
    made = models.CreateCollection.model_validate(body | {"metadata": {"offsphere": {}}})
    assert made.model_dump(exclude_unset=True, mode="json") == body | {"metadata": {"offsphere": {}}}
    assert (made.vectors.distance, made.shard_number, made.replication_factor) == (models.Distance.DOT, 6, 2)
    with pytest.raises(ValueError, match="shard_numbr"):
        models.CreateCollection.model_validate(body | {"shard_numbr": 6})
