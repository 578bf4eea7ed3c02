"""Exports into real engines: what arrives, what a second run does, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from offsphere.data.shard import Shard
from offsphere.diagnosis.subject import Encoder, open_bare
from offsphere.encoders import encode, model_fingerprint
from offsphere.errors import ConfigError, DataError, EncoderError, StoreError, UsageError
from offsphere.progress import Silent
from offsphere.search.export import export
from offsphere.search.sources import EncodedDocuments, IndexedDocuments
from offsphere.search.stores import open_store
from offsphere.search.stores.store import Record, Stamp
from offsphere.similarity import Similarity, norms

EMBEDDED = ["chroma", "faiss", "lancedb", "milvus", "parquet", "qdrant"]
COUNT = 300


def target_of(kind: str, folder: Path) -> str:
    if kind in ("faiss", "parquet"):
        return f"{kind}:{folder / f'documents.{kind}'}"
    return f"milvus:{folder / 'milvus.db'}" if kind == "milvus" else f"{kind}:{folder / kind}"


@pytest.fixture
def target(tmp_path):
    """Gives the target of a kind in an empty place."""
    return lambda kind: target_of(kind, tmp_path / "destinations")


@pytest.fixture
def corpus(tmp_path, sentences):
    """Writes a collection's corpus of 300 documents, the last of them a title alone, and gives its folder."""

    def make(texts: list[str] | None = None, name: str = "corpus") -> str:
        texts = [*sentences(COUNT - 1, 0), ""] if texts is None else texts
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
            for number, text in enumerate(texts):
                row = {"_id": f"doc/{number} é", "title": "iron" if number % 3 else "", "text": text, "year": number}
                file.write(json.dumps(row) + "\n")
        return str(folder)

    return make


@pytest.fixture
def model(static, save) -> str:
    """A static encoder with a prompt before each document; trained with dot."""
    static.prompts["document"] = "passage : "
    static.similarity_fn_name = "dot"
    return str(save(static, "static"))


@pytest.fixture
def source(model, corpus):
    """Documents encoded by the static encoder."""

    def make(similarity: str | None = None, data: str | None = None, **options) -> EncodedDocuments:
        return EncodedDocuments(open_bare(model, None, None, "cpu"), [data or corpus()], similarity, **options)

    return make


class Counted:
    """A source that counts what it encodes."""

    def __init__(self, source: EncodedDocuments):
        self._source, self.stamp, self.dimension, self.encoded = source, source.stamp, source.dimension, 0
        inner = source.embed

        def embed(documents):
            self.encoded += len(documents)
            return inner(documents)

        source.embed = embed

    def __len__(self) -> int:
        return len(self._source)

    def batches(self, size: int):
        return self._source.batches(size)


def contents(target: str, ids: list[str]) -> np.ndarray:
    with closing(open_store(target)) as store:
        return store.vectors(ids)


def passages(sentences) -> list[str]:
    texts = [*sentences(COUNT - 1, 0), ""]
    return [f"{'iron' if number % 3 else ''} {text}".strip() for number, text in enumerate(texts)]


IDS = [f"doc/{number} é" for number in range(COUNT)]


@pytest.mark.parametrize("kind", EMBEDDED)
def test_what_arrives_is_the_prepared_embedding(kind, source, target, static, sentences):
    (result,) = export(source("gamma_q=0.2,gamma_d=0.4"), [target(kind)], at_once=128)
    assert (result.written, result.kept, result.stored, result.extra) == (COUNT, 0, COUNT, 0)
    assert result.read_back >= 64 and result.largest_error < 1e-5
    raw = encode(static, passages(sentences), "document", prompt="passage : ").astype(np.float64)
    lengths = np.sqrt((raw**2).sum(axis=1, keepdims=True))
    expected = raw / np.where(lengths > 0, lengths, 1) ** 0.4
    np.testing.assert_allclose(contents(target(kind), IDS), expected, rtol=1e-4, atol=1e-5)
    with closing(open_store(target(kind))) as store:
        assert store.metric() == "ip" and store.dimension() == 16
        assert store.stamp().prompt == "passage : " and store.stamp().similarity == Similarity(0.2, 0.4)


@pytest.mark.parametrize("kind", EMBEDDED)
def test_a_second_run_encodes_and_writes_what_changed_only(kind, source, target, corpus, sentences):
    export(source(), [target(kind)])
    again = Counted(source())
    (result,) = export(again, [target(kind)])
    assert (result.written, result.kept, result.stored) == (0, COUNT, COUNT)
    assert again.encoded <= 64  # the sample that is read back
    texts = [*sentences(COUNT - 1, 0), ""]
    texts[7] = "salt"
    changed = Counted(source(data=corpus([*texts, "a new star"])))
    (result,) = export(changed, [target(kind)])
    assert (result.written, result.stored) == (2, COUNT + 1) and changed.encoded <= 66
    fresh = changed._source.embed([document for batch in changed.batches(999) for document in batch.documents][7:8])
    np.testing.assert_allclose(contents(target(kind), IDS[7:8]), fresh, rtol=1e-5)


def test_several_destinations_share_one_encoding(source, target, tmp_path):
    counted = Counted(source())
    targets = [target("lancedb"), target("parquet")]
    export(source(), targets[:1])
    results = export(counted, targets)
    assert [(one.target, one.written) for one in results] == [(targets[0], 0), (targets[1], COUNT)]
    assert counted.encoded == COUNT
    np.testing.assert_array_equal(*(contents(one, IDS) for one in targets))


def test_documents_that_are_gone_stay_and_are_counted(source, target, corpus):
    export(source(), [target("lancedb")])
    (result,) = export(source(data=corpus(["sea", "ice"])), [target("lancedb")])
    assert (result.stored, result.extra) == (COUNT, COUNT - 2)


@pytest.mark.parametrize("kind", ["parquet", "qdrant", "lancedb"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"similarity": "cosine"}, "prepared for Similarity.gamma_q=0, gamma_d=0., expected .*--similarity dot"),
        ({"prompt": "other : "}, "document prompt 'passage : ', expected 'other : ' .--document-prompt 'passage : '"),
    ],
)
def test_other_settings_are_refused(kind, change, says, source, target, corpus):
    data = corpus(["sea", "ice cold"])
    export(source(data=data), [target(kind)])
    before = contents(target(kind), IDS[:2])
    with pytest.raises(StoreError, match=says):
        export(source(data=corpus(["hot", "fire"]), **change), [target(kind)])
    np.testing.assert_array_equal(contents(target(kind), IDS[:2]), before)


def test_another_model_is_refused(source, target, corpus, static, save):
    data = corpus(["sea", "ice cold"])
    export(source(data=data), [target("lancedb")])
    static[0].embedding.weight.data *= 1.5
    other = open_bare(str(save(static, "other")), None, {"document": "passage : "}, "cpu")
    with pytest.raises(StoreError, match=r"written by the model .*other weights, tokenizer or --max-length"):
        export(EncodedDocuments(other, [data], "dot"), [target("lancedb")])


def test_another_dimension_is_refused(source, target, corpus, transformer, save):
    data = corpus(["sea", "ice cold"])
    export(source(data=data), [target("lancedb")])
    other = open_bare(str(save(transformer, "other")), None, None, "cpu")
    with pytest.raises(StoreError, match="with 16 dimensions, and this model gives 32"):
        export(EncodedDocuments(other, [data], "dot"), [target("lancedb")])


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_another_metric_is_refused(metric, source, target, corpus):
    make_chroma(target("chroma"), metric, np.ones((1, 16)), ["x"])
    with pytest.raises(StoreError, match=f"compares by {metric}; expected the inner product"):
        export(source(data=corpus(["sea"])), [target("chroma")], adopt=True)


def make_chroma(target: str, metric: str, vectors: np.ndarray, ids: list[str]) -> None:
    """A collection as somebody would make it by hand."""
    import chromadb
    from chromadb.config import Settings

    folder, _, name = target.removeprefix("chroma:").partition("#")
    client = chromadb.PersistentClient(folder, settings=Settings(anonymized_telemetry=False))
    collection = client.create_collection(
        name or "documents", embedding_function=None, configuration={"hnsw": {"space": metric}}
    )
    collection.add(ids=ids, embeddings=vectors.astype(np.float32))
    client.close()


def test_a_collection_of_somebody_else_is_refused_unless_adopted(source, target, corpus):
    data = corpus(["sea", "ice cold"])
    make_chroma(target("chroma"), "ip", np.ones((2, 16)), [IDS[0], "theirs"])
    with pytest.raises(StoreError, match=r"no stamp of offsphere.*its 2 vectors.*--adopt"):
        export(source(data=data), [target("chroma")])
    adopted, heard = source(data=data), Heard()
    (result,) = export(adopted, [target("chroma")], adopt=True, progress=heard)
    assert (result.written, result.stored, result.extra) == (2, 3, 1)
    documents = next(adopted.batches(2)).documents
    np.testing.assert_allclose(contents(target("chroma"), IDS[:2]), adopted.embed(documents), rtol=1e-5)
    # Nobody knows what the third vector is of, so that the collection stays somebody else's.
    assert any("gets no stamp, as 1 of its documents" in line for line in heard.lines)
    with pytest.raises(StoreError, match="no stamp of offsphere"):
        export(source(data=data), [target("chroma")])


def make_lancedb(target: str, metric: str, vectors: np.ndarray, ids: list[str]) -> None:
    """A table with the columns of ours, and of no metric, as somebody would make it by hand."""
    import lancedb
    import pyarrow as pa

    kinds = {name: pa.string() for name in ("id", "title", "text", "metadata", "digest")}
    kinds |= {"vector": pa.list_(pa.float32(), vectors.shape[1]), "norm": pa.float32()}
    blank = {"title": "", "text": "", "metadata": "{}", "digest": "", "norm": 0.0}
    rows = [{"id": one, "vector": vector, **blank} for one, vector in zip(ids, vectors, strict=True)]
    lancedb.connect(target.removeprefix("lancedb:")).create_table("documents", rows, pa.schema(list(kinds.items())))


@pytest.mark.parametrize(("kind", "make"), [("chroma", make_chroma), ("lancedb", make_lancedb)])
def test_an_adopted_collection_is_recognised_once_it_holds_nothing_else(kind, make, source, target, corpus):
    data = corpus(["sea", "ice cold"])
    make(target(kind), "ip", np.ones((1, 16)), [IDS[0]])
    with pytest.raises(StoreError, match=r"no stamp of offsphere"):
        export(source(data=data), [target(kind)])
    (result,) = export(source(data=data), [target(kind)], adopt=True)
    assert (result.written, result.extra) == (2, 0)
    again = Counted(source(data=data))
    (result,) = export(again, [target(kind)])
    assert (result.written, result.kept) == (0, 2)
    with pytest.raises(StoreError, match="prepared for"):
        export(source("cosine", data=data), [target(kind)], adopt=True)


WITHOUT_TEXT = ["", "sea", "ice cold", "", "hot"]  # every third document has no title either


@pytest.mark.parametrize("kind", EMBEDDED)
def test_documents_without_text_are_left_out(kind, source, target, corpus):
    """T-I2: a zero vector scores 0, and so would be the best answer where all others are negative."""
    data = corpus(["", "sea", "ice"])
    (result,) = export(source(data=data), [target(kind)])
    assert (result.written, result.kept, result.empty, result.stored, result.extra) == (2, 0, 1, 2, 0)
    with closing(open_store(target(kind))) as store:
        opposite = -store.vectors(IDS[1:3]).sum(axis=0, keepdims=True)
        (answer,) = store.search(opposite, 3)
    assert {found.id for found in answer} == set(IDS[1:3])
    assert max(found.score for found in answer) < 0, "canary"
    (again,) = export(source(data=data), [target(kind)])
    assert (again.written, again.kept, again.empty, again.stored) == (0, 2, 1, 2)


@pytest.mark.parametrize("kind", EMBEDDED)
def test_a_document_that_lost_its_text_is_gone(kind, source, target, corpus):
    (before,) = export(source(data=corpus(["fire", "sea", "ice"])), [target(kind)])
    assert (before.empty, before.stored) == (0, 3)
    (result,) = export(source(data=corpus(["", "sea", "ice"])), [target(kind)])
    assert (result.written, result.kept, result.empty, result.stored, result.extra) == (0, 2, 1, 2, 0)
    with closing(open_store(target(kind))) as store:
        assert set(store.digests(IDS[:3])) == set(IDS[1:3])


def test_nothing_but_documents_without_text(source, target, corpus):
    (result,) = export(source(data=corpus([""])), [target("lancedb")])
    assert (result.written, result.empty, result.stored, result.read_back) == (0, 1, 0, 0)


def test_shards_leave_out_their_own_documents_without_text(model, corpus, target, tmp_path):
    from offsphere.search.index import Index

    Index.create(tmp_path / "index", model, device="cpu").add(corpus(WITHOUT_TEXT))
    index = Index.open(tmp_path / "index")
    parts = [
        export(IndexedDocuments(index, shard=Shard(number, 2)), [target("lancedb")], at_once=2)[0] for number in (1, 2)
    ]
    assert (sum(part.written for part in parts), sum(part.empty for part in parts), parts[1].stored) == (3, 2, 3)
    (whole,) = export(IndexedDocuments(index), [target("lancedb")], at_once=2)
    assert (whole.written, whole.kept, whole.empty, whole.stored, whole.extra) == (0, 3, 2, 3, 0)


@pytest.mark.parametrize(("kind", "make"), [("chroma", make_chroma), ("lancedb", make_lancedb)])
def test_an_adopted_collection_keeps_nothing_of_a_document_without_text(kind, make, source, target, corpus):
    data = corpus(WITHOUT_TEXT)
    make(target(kind), "ip", np.ones((2, 16)), IDS[:2])
    (result,) = export(source(data=data), [target(kind)], adopt=True)
    assert (result.written, result.empty, result.stored, result.extra) == (3, 2, 3, 0)
    (again,) = export(source(data=data), [target(kind)])  # signed, as all of it is ours
    assert (again.written, again.kept, again.empty) == (0, 3, 2)


class Heard(Silent):
    """Progress that remembers what it was told."""

    def __init__(self):
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize("name", ["dot", "gamma_q=0.1,gamma_d=0.5"])
def test_a_destination_that_normalises_is_found_after_the_first_batch(name, source, target, monkeypatch):
    store = open_store(target("parquet"))
    write = store.write

    def normalising(records):
        unit = Similarity.parse("cosine").prepare_document(np.stack([record.vector for record in records]))
        write([Record(one.id, row, one.norm, one.title, one.text) for one, row in zip(records, unit, strict=True)])

    store.write = normalising
    monkeypatch.setattr("offsphere.search.export.open_store", lambda target: store)
    counted = Counted(source(name))
    with pytest.raises(StoreError, match=r"normalised on upload: every stored vector has length 1"):
        export(counted, [target("parquet")], at_once=50)
    assert counted.encoded <= 64


def test_documents_lost_after_writing_are_an_error(source, target, monkeypatch):
    store = open_store(target("parquet"))
    store.count = lambda: 7
    monkeypatch.setattr("offsphere.search.export.open_store", lambda target: store)
    with pytest.raises(StoreError, match="counts 7 documents after an export of 300"):
        export(source(), [target("parquet")])


def test_nothing_is_written_where_a_line_is_malformed(corpus, model, target, tmp_path):
    folder = corpus(["sea", "ice"])
    with Path(folder, "corpus.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"_id": "x"}\n')
    with pytest.raises(DataError, match=r"corpus.jsonl:3"):
        EncodedDocuments(open_bare(model, None, None, "cpu"), [folder])
    assert not (tmp_path / "destinations").exists()


def test_an_id_in_two_sources_is_an_error(corpus, model):
    first, second = corpus(["sea"], "first"), corpus(["sea"], "second")
    with pytest.raises(DataError, match=r"document 'doc/0 é' is in .*first as well"):
        EncodedDocuments(open_bare(model, None, None, "cpu"), [first, second])


def test_prompts_of_collections_come_before_the_models(corpus, model):
    first, second = corpus(["sea"], "first"), corpus(["sea"], "second")
    Path(first, "collection.yaml").write_text('prompts: {document: "of "}', encoding="utf-8")
    encoder = open_bare(model, None, None, "cpu")
    assert EncodedDocuments(encoder, [first]).stamp.prompt == "of "
    assert EncodedDocuments(encoder, [second]).stamp.prompt == "passage : "
    assert EncodedDocuments(encoder, [first], prompt="").stamp.prompt == ""
    Path(second, "corpus.jsonl").write_text('{"_id": "other", "text": "ice"}', encoding="utf-8")
    assert EncodedDocuments(encoder, [first, second]).stamp.prompt == "of "
    Path(second, "collection.yaml").write_text('prompts: {query: "? ", document: "in "}', encoding="utf-8")
    with pytest.raises(DataError, match=r"document prompt 'in ', another one 'of '.*--document-prompt"):
        EncodedDocuments(encoder, [first, second])


def test_a_model_that_says_nothing_is_asked_for(static, corpus):
    with pytest.raises(UsageError, match="does not say which similarity it was trained with"):
        EncodedDocuments(Encoder("x", static, [], None), [corpus(["sea"])])


def test_embeddings_that_are_not_finite_never_reach_a_destination(static, corpus, target):
    static[0].embedding.weight.data[static.tokenizer.token_to_id("fire")] = float("nan")
    source = EncodedDocuments(Encoder("x", static, [], Similarity.parse("dot")), [corpus(["sea", "fire"])])
    with pytest.raises(EncoderError, match=r"document 'doc/1 é' is NaN or infinite"):
        export(source, [target("parquet")])


@pytest.mark.parametrize("targets", [[], ["parquet:a.parquet"] * 2])
def test_each_destination_is_given_once(source, corpus, targets):
    with pytest.raises(ConfigError, match="give each destination once"):
        export(source(data=corpus(["sea"])), targets)


@pytest.mark.parametrize("target", ["ollama:x", "elasticsearch-cosine:http://localhost:9200", "qdrant-cosine:folder"])
def test_destinations_that_drop_length_are_refused_with_the_alternative(source, corpus, target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents = source(data=corpus(["sea", "ice"]))
    with pytest.raises(StoreError, match=r"drops the length of documents .* use "):
        export(documents, [f"parquet:{tmp_path}/first.parquet", target])
    assert not (tmp_path / "first.parquet").exists()  # refused before anything is opened
    with pytest.raises(ConfigError, match="unknown destination"):  # harmless for cosine, and no place to export to
        export(source("cosine", data=corpus(["sea", "ice"])), [target])


def test_an_index_is_exported_without_its_model(model, corpus, target, tmp_path):
    from offsphere.search.index import Index

    index = Index.create(tmp_path / "index", model, device="cpu")
    index.add(corpus())
    opened = IndexedDocuments(Index.open(tmp_path / "index"))
    (result,) = export(opened, [target("lancedb")], at_once=100)
    assert (result.written, result.stored) == (COUNT, COUNT)
    encoded = EncodedDocuments(open_bare(model, None, None, "cpu"), [corpus()])
    assert opened.stamp == encoded.stamp
    (result,) = export(encoded, [target("lancedb")])  # the same documents, the same digests
    assert result.written == 0
    export(IndexedDocuments(Index.open(tmp_path / "index"), "cosine"), [target("parquet")])
    np.testing.assert_allclose(norms(contents(target("parquet"), IDS[:-1])), 1, rtol=1e-6)


KILLED = """
import json, os, signal, sys, threading, time

# What is large is imported once, before the processes part; LanceDB itself has threads at once.
import lance_namespace, pyarrow.dataset, sentence_transformers
from offsphere.diagnosis.subject import open_bare
from offsphere.progress import Silent
from offsphere.search.export import export
from offsphere.search.sources import EncodedDocuments


class Deadly(Silent):
    def __init__(self, after, delay):
        self.after, self.delay = after, delay

    def start(self, what, total):
        return self.die

    def die(self, steps):
        if steps >= self.after:
            if self.delay:  # in the middle of whatever comes next
                threading.Timer(self.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)


model, data, cases = sys.argv[1:]
for target, after, delay in json.loads(cases):
    child = os.fork()
    if not child:
        source = EncodedDocuments(open_bare(model, None, None, "cpu"), [data])
        export(source, [target], at_once=30, progress=Deadly(after, delay))
        time.sleep(5)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
"""


def test_after_kill_9_the_same_call_completes(model, corpus, source, tmp_path):
    data = corpus()
    cases = [
        (target_of(kind, tmp_path / f"{kind}-{after}"), after, delay)
        for kind, after, delay in [
            ("lancedb", 90, 0.0),
            ("lancedb", COUNT, 0.005),  # while the files of all writes are merged
            ("qdrant", 30, 0.01),
            ("parquet", 30, 0.01),
            ("parquet", COUNT, 0.0),
        ]
    ]
    script = [sys.executable, "-c", KILLED, model, data, json.dumps(cases)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    encoded = source(data=data)
    documents = [document for batch in encoded.batches(COUNT) for document in batch.documents]
    right = encoded.embed(documents)
    for target, after, _ in cases:
        with closing(open_store(target)) as store:
            stored = store.digests(IDS)
            assert after <= len(stored) == store.count() and len(stored) % 30 == 0
        (result,) = export(Counted(source(data=data)), [target])
        assert (result.kept, result.written, result.stored) == (len(stored), COUNT - len(stored), COUNT)
        np.testing.assert_allclose(contents(target, IDS), right, rtol=1e-4, atol=1e-5)
        if target.startswith("parquet"):
            from pyarrow import parquet

            assert sorted(parquet.read_table(target.partition(":")[2])["id"].to_pylist()) == sorted(IDS)


def test_progress_counts_documents(source, target):
    seen = []

    class Heard(Silent):
        def start(self, what, total):
            seen.append((what, total))
            return seen.append

    export(source(), [target("parquet")], at_once=100, progress=Heard())
    assert seen == [("export", COUNT), 100, 200, 300]


def test_the_stamp_says_who_wrote(source, target, static):
    export(source(), [target("parquet")])
    with closing(open_store(target("parquet"))) as store:
        assert store.stamp() == Stamp(Similarity.parse("dot"), model_fingerprint(static), "passage : ")
