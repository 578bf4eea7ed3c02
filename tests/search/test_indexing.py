from __future__ import annotations

import json
import math

import numpy as np
import pytest

from offsphere.data.documents import Document
from offsphere.encoders import encode
from offsphere.errors import ConfigError, DataError, EncoderError, UsageError
from offsphere.search import indexing
from offsphere.search.index import Index
from offsphere.search.manifest import read_manifest
from offsphere.similarity import norms


class TestAdding:
    def test_only_what_is_new_or_changed_is_encoded(self, index, documents, monkeypatch):
        encoded: list[str] = []

        def counted(model, texts, *rest, **more):
            encoded.extend(texts)
            return encode(model, texts, *rest, **more)

        monkeypatch.setattr(indexing, "encode", counted)
        version = index._table.version
        added = index.add(documents)
        assert (added.new, added.changed, added.unchanged, encoded) == (0, 0, 30, [])
        assert index._table.version == version
        other = [
            Document("new", "", "honey"),
            Document("d3", "", "salt"),
            Document("d4", documents[4].title, documents[4].text, {"lang": "fr"}),
        ]
        added = index.add(other)
        assert (added.new, added.changed, added.unchanged) == (1, 2, 0)
        assert sorted(encoded) == sorted(["honey", "salt", documents[4].passage])
        everything = {one.id: one for one in [*documents, *other]}
        assert {one.id: one for one in index.documents([*everything, "x"])} == everything
        assert index.search("salt", 1, "cosine")[0].id == "d3"
        assert [hit.id for hit in index.search("salt", where="lang = 'fr'")] == ["d4"]

    def test_documents_that_are_gone_stay_unless_asked(self, index, documents):
        assert index.add(documents[:10]).deleted == 0
        assert index.count() == 30
        assert index.add(documents[5:10], delete_missing=True).deleted == 25
        assert sorted(index.ids) == sorted(one.id for one in documents[5:10])
        with pytest.raises(UsageError, match="nothing to index"):
            index.add(delete_missing=True)

    def test_delete(self, index, tmp_path, model):
        awkward = ["a'b", 'q"q', "back\\slash", "new\nline", "a/b", "💡", " ", "%", "'); --", "e\u0301", "\u00e9"]
        index.add([Document(one, "", "bee") for one in awkward])
        assert index.count() == 30 + len(awkward)
        for one in awkward:
            assert [document.id for document in index.documents([one])] == [one]
            assert index.delete([one, "nowhere"]) == 1
            assert one not in index.ids
        assert index.count() == 30
        assert index.delete([]) == 0

    def test_an_id_twice_is_refused_before_anything_is_encoded(self, index, documents):
        with pytest.raises(DataError, match="the id 'x' occurs twice, in the given documents and in the given"):
            index.add([Document("y", "", "bee"), Document("x", "", "bee")], [Document("x", "", "moon")])
        assert index.count() == 30

    def test_a_malformed_line_is_found_before_anything_is_encoded(self, index, tmp_path):
        lines = [json.dumps({"_id": f"x{number}", "text": "bee"}) for number in range(5)]
        (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{"]), encoding="utf-8")
        with pytest.raises(DataError, match=r"a\.jsonl:6: malformed JSON"):
            index.add(tmp_path / "a.jsonl")
        assert index.count() == 30

    def test_an_iterator_is_read_once(self, index):
        assert index.add(Document(f"x{number}", "", "bee") for number in range(3)).new == 3

    def test_texts_of_a_megabyte_and_of_nothing(self, index):
        long = "moon " * 200_000
        added = index.add([Document("long", "", long.strip()), Document("nothing")])
        assert (added.new, added.empty) == (2, 1)
        (document,) = index.documents(["long"])
        assert document.text == long.strip()

    def test_cut_texts_and_lost_tokens_are_counted(self, tmp_path, transformer, save):
        index = Index.create(tmp_path / "index", save(transformer), similarity="dot", max_length=6)
        texts = ["moon", "moon sea tide salt", "moon sea tide salt bee honey", ""]
        added = index.add([Document(str(number), "", text) for number, text in enumerate(texts)])
        assert (added.cut, added.tokens_lost, added.empty) == (1, 2, 1)  # [CLS] and [SEP] count

    def test_batches_and_their_order_change_no_static_embedding(self, index, documents, tmp_path, model, content):
        other = Index.create(tmp_path / "other", model, similarity="dot")
        other.add(documents[20:])
        other.add(list(reversed(documents)), batch_size=2)
        assert content(other) == content(index)
        raw = encode(index.encoder, [one.passage for one in index.documents(index.ids)], "document")
        np.testing.assert_array_equal(index.embeddings, raw)
        np.testing.assert_array_equal(index.norms, norms(raw))

    def test_a_broken_embedding_is_refused_and_the_rest_kept(self, index, monkeypatch):
        monkeypatch.setattr(indexing, "BATCHES", 1)
        monkeypatch.setattr(indexing, "COMMIT_SECONDS", 0.0)

        def broken(model, texts, *rest, **more):
            vectors = encode(model, texts, *rest, **more)
            vectors[[text == "salt" for text in texts]] = math.nan
            return vectors

        monkeypatch.setattr(indexing, "encode", broken)
        with pytest.raises(EncoderError, match=r"NaN or infinite, such as that of 'x4'"):
            index.add([Document(f"x{n}", "", "salt" if n == 4 else "moon sea tide") for n in range(5)], batch_size=2)
        assert sorted(set(index.ids) - {f"d{n}" for n in range(30)}) == ["x0", "x1", "x2", "x3"]


class TestFields:
    def test_kinds(self, index):
        index.add([Document("x", "", "bee", {"year": 1999, "ok": True, "tags": ["a"], "my field": "y", "Größe": 1.5})])
        assert {name: index.manifest.fields[name] for name in ("year", "ok", "tags", "my field", "Größe")} == {
            "year": "number",
            "ok": "flag",
            "tags": None,
            "my field": "text",
            "Größe": "number",
        }
        for where in ("year = 1999", "ok", "`my field` = 'y'", "`Größe` > 1", "lang IS NULL"):
            assert [hit.id for hit in index.search("bee", where=where)] == ["x"]
        assert index.search("bee", 1, "cosine")[0].metadata["tags"] == ["a"]
        with pytest.raises(ConfigError, match="lists, objects or of mixed kinds cannot"):
            index.search("bee", where="tags = 'a'")

    def test_a_field_of_two_kinds_can_no_longer_be_filtered_by_and_says_so(self, index):
        index.add([Document("x", "", "bee", {"number": "seven"})])
        assert index.manifest.fields == {"number": None, "lang": "text"}
        with pytest.raises(ConfigError, match="the fields id, title, text, norm, lang"):
            index.search("bee", where="number = 7")
        assert {one.metadata["number"] for one in index.documents(["x", "d3"])} == {"seven", 3}
        index.add([Document("y", "", "bee", {"number": 8})])  # not back with nulls for all others
        assert index.manifest.fields["number"] is None

    def test_names_that_sql_or_the_table_cannot_hold_are_kept_as_json(self, index):
        names = ["a.b", "vector", "digest", "_rowid", "tick`", "", "id", "x" * 200]
        index.add([Document("x", "", "bee", dict.fromkeys(names, 1) | {"big": 2**60})])
        assert [index.manifest.fields[name] for name in (*names, "big")] == [None] * 9
        (document,) = index.documents(["x"])
        assert document.metadata == dict.fromkeys(names, 1) | {"big": 2**60}

    def test_columns_are_mended_where_a_process_was_stopped_before_them(self, index, monkeypatch):
        manifest = read_manifest(index.folder)
        object.__setattr__(manifest, "fields", {"lang": None, "number": "number", "late": "text"})
        manifest.write(index.folder)
        again = Index.open(index.folder)
        again.add([Document("x", "", "bee", {"late": "yes"})])
        assert sorted(again._table.fields()) == ["late", "number"]
        assert [hit.id for hit in again.search("bee", where="late = 'yes'")] == ["x"]
