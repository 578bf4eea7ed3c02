"""Exports into real engines: what arrives, what a second run does, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from offsphere.diagnosis.subject import Encoder, open_bare
from offsphere.encoders import encode, model_fingerprint
from offsphere.errors import ConfigError, EncoderError, StoreError
from offsphere.progress import Silent
from offsphere.search.export import export
from offsphere.search.sources import EncodedDocuments, IndexedDocuments
from offsphere.search.stores import open_store
from offsphere.search.stores.store import Record, Stamp
from offsphere.similarity import Similarity, norms

EMBEDDED = ["chroma", "faiss", "lancedb", "milvus", "parquet", "qdrant"]
COUNT = 300
IDS = [f"doc/{number} é" for number in range(COUNT)]


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


def passages(sentences) -> list[str]:
    texts = [*sentences(COUNT - 1, 0), ""]
    return [f"{'iron' if number % 3 else ''} {text}".strip() for number, text in enumerate(texts)]


@pytest.mark.parametrize("kind", EMBEDDED)
def test_what_arrives_is_the_prepared_embedding(kind, source, target, static, sentences, contents):
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
def test_a_second_run_encodes_and_writes_what_changed_only(kind, source, target, corpus, sentences, contents):
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


def test_several_destinations_share_one_encoding(source, target, tmp_path, contents):
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
def test_other_settings_are_refused(kind, change, says, source, target, corpus, contents):
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


def test_an_index_is_exported_without_its_model(prompted_model, corpus, target, tmp_path, contents):
    from offsphere.search.index import Index

    index = Index.create(tmp_path / "index", prompted_model, device="cpu")
    index.add(corpus())
    opened = IndexedDocuments(Index.open(tmp_path / "index"))
    (result,) = export(opened, [target("lancedb")], at_once=100)
    assert (result.written, result.stored) == (COUNT, COUNT)
    encoded = EncodedDocuments(open_bare(prompted_model, None, None, "cpu"), [corpus()])
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


def test_after_kill_9_the_same_call_completes(prompted_model, corpus, source, target, contents):
    data = corpus()
    cases = [
        (target(kind, f"{kind}-{after}"), after, delay)
        for kind, after, delay in [
            ("lancedb", 90, 0.0),
            ("lancedb", COUNT, 0.005),  # while the files of all writes are merged
            ("qdrant", 30, 0.01),
            ("parquet", 30, 0.01),
            ("parquet", COUNT, 0.0),
        ]
    ]
    script = [sys.executable, "-c", KILLED, prompted_model, data, json.dumps(cases)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    encoded = source(data=data)
    documents = [document for batch in encoded.batches(COUNT) for document in batch.documents]
    right = encoded.embed(documents)
    for at, after, _ in cases:
        with closing(open_store(at)) as store:
            stored = store.digests(IDS)
            assert after <= len(stored) == store.count() and len(stored) % 30 == 0
        (result,) = export(Counted(source(data=data)), [at])
        assert (result.kept, result.written, result.stored) == (len(stored), COUNT - len(stored), COUNT)
        np.testing.assert_allclose(contents(at, IDS), right, rtol=1e-4, atol=1e-5)
        if at.startswith("parquet"):
            from pyarrow import parquet

            assert sorted(parquet.read_table(at.partition(":")[2])["id"].to_pylist()) == sorted(IDS)


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
