"""Processes that are stopped while they write to an index, and several that use one at the same time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from offsphere.data.documents import Document
from offsphere.errors import IndexFolderError
from offsphere.search.index import Index
from offsphere.search.manifest import writing

ADD = """
import sys
from offsphere.search import indexing
from offsphere.search.index import Index

indexing.WINDOW, indexing.BATCHES, indexing.COMMIT_SECONDS = 500, 1, 0.0


class Shown:
    def say(self, text):
        pass

    def start(self, what, total):
        return lambda done: print(done, flush=True)


Index.create(sys.argv[1], sys.argv[2]).add(sys.argv[3], batch_size=100, progress=Shown())
"""


class TestStops:
    def test_killed_while_adding_and_changing(self, tmp_path, model, sentences, content):
        """Half of the documents are there and have changed, the other half is new; the process is killed among them."""
        texts = sentences(2000, 1)
        (tmp_path / "corpus").mkdir()
        rows = [{"_id": f"d{number}", "text": f"{text} moon", "n": number} for number, text in enumerate(texts)]
        corpus = tmp_path / "corpus" / "corpus.jsonl"
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        before = [Document(f"d{number}", "", f"{text} bee", {"n": number}) for number, text in enumerate(texts)][::2]
        whole, index = (Index.create(tmp_path / name, model, similarity="dot") for name in ("whole", "index"))
        for one in (whole, index):
            one.add(before)

        with subprocess.Popen(
            [sys.executable, "-c", ADD, str(index.folder), model, str(corpus.parent)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ) as process:
            for line in process.stdout:
                if int(line) >= 500:
                    process.send_signal(signal.SIGKILL)
                    break
            rest = process.stdout.read().split()
            assert process.wait() == -signal.SIGKILL
        assert "2000" not in rest

        index = Index.create(index.folder, model)
        there = content(index)  # which fails where an id is twice
        assert 1000 < len(there) < 2000
        assert index.search("bee", 3)  # and can be searched at once
        changed = sum(there[one.id][3] != one.text for one in before)
        added = index.add(corpus.parent)
        assert (added.new, added.changed) == (2000 - len(there), 1000 - changed)
        assert 200 <= changed < 1000
        whole.add(corpus.parent)
        assert content(index) == content(whole)
        assert index.search("moon tide", 20) == whole.search("moon tide", 20)

    def test_stopped_before_the_table(self, tmp_path, model):
        Index.create(tmp_path / "index", model, similarity="dot")  # a manifest, and nothing else
        (tmp_path / "index" / "documents.lance" / "data").mkdir(parents=True)  # what a stopped creation leaves
        index = Index.create(tmp_path / "index", model)
        assert index.add([Document("a", "", "bee")]).new == 1
        assert Index.open(tmp_path / "index").search("bee")[0].id == "a"

    def test_stopped_before_the_manifest(self, tmp_path, model):
        (tmp_path / "index").mkdir()
        (tmp_path / "index" / "index.lock").touch()
        (tmp_path / "index" / "manifest.json.17.tmp").write_text('{"form', encoding="utf-8")
        assert Index.create(tmp_path / "index", model, similarity="dot").count() == 0

    def test_two_writers_at_once(self, index):
        with writing(index.folder):
            for attempt in (lambda: index.add([Document("x", "", "bee")]), lambda: index.delete(["d1"])):
                with pytest.raises(IndexFolderError, match=r"another process is writing to .*; wait until it ends"):
                    attempt()
            assert len(index.search("bee", 3)) == 3  # reading goes on
        assert index.add([Document("x", "", "bee")]).new == 1

    def test_a_reader_keeps_its_version_while_another_writes(self, index):
        reader = Index.open(index.folder)
        before = reader.search("bee moon", 30)
        index.add([Document("x", "", "bee"), Document("d3", "", "bee")])
        index.delete(["d1"])
        assert reader.search("bee moon", 30) == before
        assert {"x"} <= {hit.id for hit in Index.open(index.folder).search("bee moon", 30)}

    def test_an_index_that_was_made_anew_is_noticed(self, index, tmp_path, model):
        import shutil

        other = Index.open(index.folder)
        shutil.rmtree(index.folder)
        Index.create(index.folder, model, similarity="cosine")
        with pytest.raises(IndexFolderError, match="was made anew in the meantime"):
            other.add([Document("x", "", "bee")])
