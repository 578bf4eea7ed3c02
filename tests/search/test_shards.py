"""Several indexes searched as one, beside one index of the same documents."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offsphere.data import Collection
from offsphere.data.documents import Document
from offsphere.data.shard import Shard
from offsphere.encoders import encode
from offsphere.errors import ConfigError, IndexFolderError
from offsphere.evaluation.ranking import write_trec
from offsphere.search import vectors
from offsphere.search.index import Index
from offsphere.search.shards import Shards
from offsphere.search.sources import IndexedDocuments

COUNT = 60
SHARDS = 3
SIMILARITIES = ("cosine", "dot", "qnorm", "dnorm", "gamma_q=0.3,gamma_d=0.6")
QUERIES = ["bee moon", "the a of", "night star iron"]


@pytest.fixture
def documents(sentences) -> list[Document]:
    """Ties, across shards as well; two documents without text; fields that few documents have."""
    texts = [*sentences(COUNT - 12, 0), *["moon"] * 10, "", " "]
    made = [
        Document(f"d{number}", "", text, {"number": number, "lang": "en" if number % 2 else "de"})
        for number, text in enumerate(texts)
    ]
    made[7].metadata["rare"] = 1
    made[9].metadata["mixed"], made[10].metadata["mixed"] = 1, "one"
    random.Random(0).shuffle(made)
    return made


@pytest.fixture
def whole(tmp_path, model, documents) -> Index:
    made = Index.create(tmp_path / "whole", model, similarity="dot")
    made.add(documents)
    return made


@pytest.fixture
def folders(tmp_path, model, documents) -> list[Path]:
    made = []
    for number in range(1, SHARDS + 1):
        index = Index.create(tmp_path / f"shard{number}", model, similarity="dot")
        index.add(documents, shard=Shard(number, SHARDS))
        made.append(index.folder)
    return made


@pytest.fixture
def collection(documents) -> Collection:
    texts = {one.id: one.passage for one in documents}
    queries = {f"q{number}": text for number, text in enumerate(QUERIES)} | {"d3": "moon tide"}
    excluded = {"q0": frozenset({"d5", "d6", "d7"})}
    qrels = {query: {"d1": 1} for query in queries}
    return Collection("small", "test", texts, queries, qrels, excluded=excluded, exclude_self=True)


class TestSameAsOneIndex:
    @pytest.mark.parametrize("memory", [None, 0])
    def test_hits(self, whole, folders, memory, monkeypatch):
        monkeypatch.setattr(vectors, "BLOCK", 7)
        shards = Shards.open(folders, memory=memory)
        assert (shards.ids, shards.count()) == (whole.ids, COUNT)
        assert ("block by block" in shards.explain()) == (memory == 0)
        for similarity in SIMILARITIES:
            for k in (1, 9, COUNT + 5):
                assert shards.search(QUERIES, k, similarity) == whole.search(QUERIES, k, similarity)
        hits = shards.search("moon", 10)  # all ten score the same
        assert [hit.id for hit in hits] == sorted((hit.id for hit in hits), reverse=True)
        assert len({hit.score for hit in hits}) == 1
        assert len({number for number, index in enumerate(shards.indexes) for hit in hits if hit.id in index.ids}) > 1

    @pytest.mark.parametrize("memory", [None, 0])
    @pytest.mark.parametrize("similarity", ["dot", "cosine"])
    def test_run_files(self, whole, folders, collection, tmp_path, memory, similarity):
        shards = Shards.open(folders, memory=memory)
        for name, searcher in (("whole", whole), ("shards", shards)):
            for k in (5, 100):
                write_trec(searcher.rank(collection, similarity, k), tmp_path / f"{name}{k}.trec", "tag")
        for k in (5, 100):
            written = (tmp_path / f"shards{k}.trec").read_bytes()
            assert written == (tmp_path / f"whole{k}.trec").read_bytes()
            assert written.count(b"\n") == (20 if k == 5 else 4 * (COUNT - 2) - 3 - 1)

    @pytest.mark.parametrize(
        "where",
        ["lang = 'en'", "number >= 10 AND number < 20.5", "rare = 1", "rare IS NULL", "id = 'd4'", "number > 1000"],
    )
    def test_filters(self, whole, folders, where):
        for memory in (None, 0):
            shards = Shards.open(folders, memory=memory)
            assert shards.search("bee moon", COUNT, where=where) == whole.search("bee moon", COUNT, where=where)

    def test_what_one_index_refuses_is_refused(self, whole, folders):
        shards = Shards.open(folders)
        for where in ("mixed = 1", "langg = 'en'", "lang =="):
            for searcher in (whole, shards):
                with pytest.raises(ConfigError, match="cannot filter by"):
                    searcher.search("bee", where=where)
        for searcher in (whole, shards):
            with pytest.raises(ConfigError, match="k must be at least 1"):
                searcher.search("bee", 0)

    def test_one_shard_is_the_index_itself(self, whole):
        assert Shards([whole]).search(QUERIES, 20) == whole.search(QUERIES, 20)

    def test_more_shards_than_documents(self, tmp_path, model):
        few = [Document(f"d{number}", "", "bee moon"[: 3 + 5 * number]) for number in range(2)]
        indexes = []
        for number in range(1, 6):
            indexes.append(Index.create(tmp_path / str(number), model, similarity="dot"))
            indexes[-1].add(few, shard=Shard(number, 5))
        assert sorted(index.count() for index in indexes)[:3] == [0, 0, 0]
        shards = Shards(indexes)
        assert sorted(hit.id for hit in shards.search("bee")) == ["d0", "d1"]
        for index in indexes:
            index.delete(index.ids)
        with pytest.raises(IndexFolderError, match="hold no documents; add some with"):
            shards.search("bee")


class TestMaking:
    def test_shards_have_every_document_once(self, folders, documents, whole):
        held = [Index.open(folder).ids for folder in folders]
        assert sorted(one for ids in held for one in ids) == sorted(one.id for one in documents)
        assert min(map(len, held)) > 0
        assert all(Index.open(folder).manifest.fields == whole.manifest.fields for folder in folders)

    def test_adding_again_encodes_nothing_and_changes_arrive_in_their_shard(self, folders, documents, monkeypatch):
        shards = Shards.open(folders)
        before = shards.ids
        documents[0] = replace(documents[0], text="honey honey honey")
        changed = [
            index.add(documents, shard=Shard(number, SHARDS)) for number, index in enumerate(shards.indexes, start=1)
        ]
        assert sorted((one.new, one.changed) for one in changed) == [(0, 0), (0, 0), (0, 1)]
        assert sum(one.unchanged for one in changed) == COUNT - 1
        assert shards.ids == before
        assert shards.search("honey", 1, "dot")[0].id == documents[0].id  # the shards follow their indexes

    def test_delete_missing_leaves_the_shard(self, whole, documents):
        added = whole.add(documents, shard=Shard(2, SHARDS), delete_missing=True)
        assert whole.ids == sorted((one.id for one in documents if Shard(2, SHARDS).holds(one.id)), reverse=True)
        assert added.deleted == COUNT - whole.count() > 0
        again = whole.add(documents)
        assert again.new == added.deleted

    def test_shards_of_an_index_to_export(self, whole):
        parts = [IndexedDocuments(whole, shard=Shard(number, 4)) for number in range(1, 5)]
        ids = [[one.id for batch in part.batches(7) for one in batch.documents] for part in parts]
        assert [len(part) for part in parts] == [len(some) for some in ids]
        assert sorted(one for some in ids for one in some) == sorted(whole.ids)
        (batch, *_) = parts[0].batches(1000)
        rows = [whole.ids.index(one.id) for one in batch.documents]
        np.testing.assert_array_equal(batch.embed(range(len(rows))), whole.embeddings[rows])


class TestRefusals:
    def test_a_document_in_two_indexes(self, folders, documents):
        twice = next(one for one in documents if Shard(1, SHARDS).holds(one.id))
        Index.open(folders[2]).add([twice])
        with pytest.raises(IndexFolderError, match=f"document '{twice.id}' is in .*shard[13] and .*shard[13];"):
            Shards.open(folders).search("bee")

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"similarity": "cosine"}, "similarity .*cosine"),
            ({"prompts": {"document": "passage :"}}, "prompts .*'passage :'"),
            ({"max_length": 3}, "max_length None and 3"),
        ],
    )
    def test_indexes_that_were_made_otherwise(self, whole, tmp_path, model, options, said):
        other = Index.create(tmp_path / "other", model, **{"similarity": "dot", **options})
        with pytest.raises(IndexFolderError, match=f"whole and .*other cannot be searched as one, .*{said}"):
            Shards([whole, other])

    def test_another_model(self, whole, tmp_path, static, save):
        static[0].embedding.weight.data *= 2
        other = Index.create(tmp_path / "other", str(save(static, "twice")), similarity="dot")
        with pytest.raises(IndexFolderError, match="they differ: fingerprint"):
            Shards([whole, other])

    def test_the_same_model_elsewhere_is_the_same(self, whole, tmp_path, static, save):
        other = Index.create(tmp_path / "other", str(save(static, "copy")), similarity="dot")
        other.add([Document("x", "", "bee")])
        assert Shards([whole, other]).count() == COUNT + 1

    def test_the_same_index_twice_and_none(self, whole):
        for indexes in ([whole, Index.open(whole.folder)], []):
            with pytest.raises(ConfigError, match="give each index once"):
                Shards(indexes)
        with pytest.raises(ConfigError, match="give each index once, found none"):
            Shards.open([])

    def test_a_field_that_only_one_index_has(self, whole, tmp_path, model):
        other = Index.create(tmp_path / "other", model, similarity="dot")
        other.add([Document("x", "", "bee", {"number": "text", "tag": True})])
        shards = Shards([whole, other])
        for where in ("tag", "x = 1 OR TAG", "number > 3"):
            with pytest.raises(IndexFolderError, match=r"not the same field in every index .*whole: .*other: "):
                shards.search("bee", where=where)
        assert {hit.id for hit in shards.search("bee", where="id IN ('x', 'd1')")} == {"x", "d1"}

    def test_an_index_that_was_only_begun(self, whole, tmp_path, model):
        begun = Index.create(tmp_path / "begun", model, similarity="dot")
        with pytest.raises(IndexFolderError, match="begun has no table yet"):
            Shards([whole, begun]).search("bee")


def test_the_model_is_opened_once(folders, monkeypatch):
    from offsphere.search import index

    opened = []
    monkeypatch.setattr(index, "open_bare", lambda *given, real=index.open_bare: opened.append(given) or real(*given))
    shards = Shards.open(folders)
    assert len(shards.search(QUERIES, 5)) == len(QUERIES)
    assert shards.search_embeddings(encode(shards.encoder, QUERIES, "query"), 5) == shards.search(QUERIES, 5)
    assert len(opened) == 1


def test_approximate_search_is_said_not_to_be_used(folders):
    pytest.importorskip("faiss")
    Index.open(folders[0]).approximate()
    shards = Shards.open(folders)
    assert "shards are searched exactly; the approximate search of 1 is not used" in shards.explain()
    assert len(shards.search("bee", COUNT)) == COUNT - 2
