"""The approximate index beside the table: the graphs are real, only which one stays is not left to the clock."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offsphere.data.documents import Document
from offsphere.search import approximation
from offsphere.search.approximate import ApproximateIndex, choose
from offsphere.search.graphs import new_graph
from offsphere.search.index import Index
from offsphere.search.manifest import read_manifest
from offsphere.search.recall import Trial
from offsphere.search.table import DocumentTable

KILLED = Path(__file__).with_name("killed_index.py")


@pytest.fixture
def documents(sentences) -> list[Document]:
    return [Document(f"d{number}", "", text, {"n": number}) for number, text in enumerate(sentences(400, 0))]


@pytest.fixture
def index(tmp_path, static, save, documents, sentences, monkeypatch) -> Index:
    def graph_stays(vectors, queries, similarity, recall, k, *, seed, progress):
        chosen = choose(vectors, queries, similarity, recall, k, methods=(), seed=seed)
        graph = new_graph("inner-product", vectors.shape[1])
        graph.add(np.ascontiguousarray(similarity.prepare_document(vectors)))
        found = ApproximateIndex(graph, 512, chosen.choice, chosen._queries)
        trial = Trial(graph.documents, found._queries, k)
        found.choice = replace(found.choice, kept=found.keep_promise(trial, progress))
        assert found.choice.kept is not None
        return found

    monkeypatch.setattr(approximation, "choose", graph_stays)
    made = Index.create(tmp_path / "index", save(static), similarity="dot")
    made.add([*documents, Document("empty")])
    made.approximate(queries=sentences(200, 1))
    return made


QUERIES = ["bee dance", "moon tide", "iron"]


def folders(index: Index) -> list[str]:
    return sorted(one.name for one in index.folder.glob("approximate-*"))


def exact(index: Index, *arguments, **more):
    """What the index answers without its approximate index."""
    plain = Index.open(index.folder)
    object.__setattr__(plain.manifest, "approximate", None)
    return plain.search(*arguments, **more)


def test_search_goes_through_the_graph_and_scores_are_exact(index):
    opened = Index.open(index.folder)
    asked = []
    walk = ApproximateIndex.search
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ApproximateIndex, "search", lambda self, *a: asked.append(a) or walk(self, *a))
        found = opened.search(QUERIES, 10)
    assert len(asked) == 1
    assert opened.explain().startswith("ranked under dot: approximate search over 401 documents")
    assert found == exact(index, QUERIES, 10)  # 512 candidates of 400 documents


def test_what_the_graph_cannot_answer_is_answered_exactly_and_says_why(index):
    opened = Index.open(index.folder)
    for arguments, why in (
        ({"where": "n < 5"}, "filters are answered exactly"),
        ({"similarity": "cosine"}, "is for dot"),
    ):
        assert why in opened.explain(**arguments)
        assert ": exact search over" in opened.explain(**arguments)
        assert opened.search(QUERIES, 5, **arguments) == exact(index, QUERIES, 5, **arguments)
    assert ": approximate search" in opened.explain(similarity="qnorm")  # the documents are prepared alike
    assert opened.search(QUERIES, 5, "qnorm") == exact(index, QUERIES, 5, "qnorm")


def test_stale_after_changes_until_it_is_renewed(index, sentences):
    index.add([Document("d3", "", "bee bee bee"), Document("new", "", "bee")])
    index.delete(["d7"])
    for opened in (index, Index.open(index.folder)):
        assert "documents have changed since" in opened.explain()
        assert opened.search("bee", 400) == exact(index, "bee", 400)
    before = folders(index)
    index.approximate(queries=sentences(200, 1))
    assert folders(index) != before and len(folders(index)) == 1
    opened = Index.open(index.folder)
    assert opened.explain().startswith("ranked under dot: approximate search")
    assert opened.search("bee", 10) == exact(index, "bee", 10)
    assert "d7" not in {hit.id for hit in opened.search("bee", 400)}


def test_new_documents_go_into_the_graph_that_is_there(index, monkeypatch):
    grown = []
    add = ApproximateIndex.add
    monkeypatch.setattr(ApproximateIndex, "add", lambda self, new, *a: grown.append(len(new)) or add(self, new, *a))
    monkeypatch.setattr(approximation, "choose", lambda *a, **k: pytest.fail("built anew"))
    index.add([Document(f"new{number}", "", f"{word} bee honey") for number, word in enumerate(("moon", "sun", "sea"))])
    index.add([Document("nothing")])
    index.approximate()
    assert grown == [3]
    opened = Index.open(index.folder)
    assert opened.explain().startswith("ranked under dot: approximate search over 405")
    assert opened.search(QUERIES, 10) == exact(index, QUERIES, 10)
    assert {f"new{number}" for number in range(3)} <= {hit.id for hit in opened.search("bee honey", 100)}
    index.approximate()  # nothing has changed: nothing is done
    assert grown == [3]


@pytest.mark.parametrize("lost", ["folder", "ids", "settings"])
def test_lost_or_damaged_parts_mean_exact_search(index, sentences, lost):
    folder = index.folder / folders(index)[0]
    if lost == "folder":
        shutil.rmtree(folder)
    else:
        (folder / ("documents.json" if lost == "ids" else "settings.json")).write_text("{", encoding="utf-8")
    opened = Index.open(index.folder)
    assert "lost or damaged; make it again" in opened.explain()
    assert opened.search(QUERIES, 10) == exact(index, QUERIES, 10)
    index.approximate(queries=sentences(200, 1))
    assert Index.open(index.folder).explain().startswith("ranked under dot: approximate search")


def killed(what: str, index: Index, copies: Path) -> tuple[int, int]:
    """How many processes were killed, and how many ended, each on a copy of the index."""
    copies.mkdir()
    done = subprocess.run([sys.executable, KILLED, what, index.folder, copies], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    dead, ended = json.loads(done.stdout)
    return dead, ended


def test_a_kill_before_any_step_leaves_an_index_that_answers_and_can_be_renewed(index, tmp_path):
    index.add([Document("new", "", "bee")])
    right = exact(index, QUERIES, 10)
    steps, _ = killed("approximate", index, tmp_path / "copies")
    assert steps >= 8
    met = set()
    for step in range(steps + 1):
        opened = copy_of(index, tmp_path / "copies" / str(step))
        met.add(opened.explain().partition(" over ")[0])
        assert opened.search(QUERIES, 10) == right
        opened.approximate()
        assert opened.manifest.approximate["folder"] and len(folders(opened)) == 1
        again = copy_of(index, opened.folder)
        assert again.explain().startswith("ranked under dot: approximate search")
        assert again.search(QUERIES, 10) == right
    assert met == {"ranked under dot: exact search", "ranked under dot: approximate search"}


def test_a_kill_at_any_moment_of_a_compaction_loses_nothing(index, documents, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(DocumentTable, "compact", lambda self: None)
        for number in range(40):  # one file each
            index.add([Document(f"more{number}", "", "bee moon")])
    files = len(list(index.folder.glob("documents.lance/data/*")))
    right = exact(index, QUERIES, 10)
    dead, ended = killed("compact", index, tmp_path / "copies")
    assert dead >= 3, "most must be killed while they compact"
    for number in range(dead + ended):
        opened = copy_of(index, tmp_path / "copies" / str(number))
        assert opened.search(QUERIES, 10) == right  # exact, as there is no graph for these documents
        assert opened.add(documents).unchanged == len(documents)  # which finishes it
        assert opened.count() == index.count()
        assert fragments(opened) == 1 < files


def copy_of(index: Index, folder: Path) -> Index:
    """The index in this folder, with the model that is open already."""
    return Index(folder, read_manifest(folder), index.encoder)


def fragments(index: Index) -> int:
    """Files of rows that the newest version of the table consists of."""
    return index._opened()._table.stats()["fragment_stats"]["num_fragments"]


def test_exact_search_stays_where_nothing_is_better(tmp_path, static, save, documents):
    index = Index.create(tmp_path / "index", save(static), similarity="dot")
    index.add(documents)
    reason = index.approximate(queries=["bee"])  # one query proves nothing
    assert reason.startswith("exact search stays")
    assert folders(index) == []
    assert reason in Index.open(index.folder).explain()
    assert index.manifest.approximate["folder"] is None
    assert len(index.search("bee")) == 10


def test_queries_to_measure_with_are_drawn_once():
    many = [f"q{number}" for number in range(3000)] + ["", " "]
    assert approximation.drawn(many, 0) == approximation.drawn(list(reversed(many)), 0)
    assert len(set(approximation.drawn(many * 2, 1))) == approximation.MOST_QUERIES
    assert approximation.drawn(["b", "a", "a"], 0) in (["a", "b"], ["b", "a"])
