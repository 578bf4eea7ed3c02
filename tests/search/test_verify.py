"""Verification of live collections: of our exports, and of collections made by hand with every slip."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from offsphere.diagnosis.subject import open_bare
from offsphere.encoders import encode
from offsphere.errors import ConfigError, DataError, StoreError, UsageError
from offsphere.search.export import export
from offsphere.search.sources import EncodedDocuments
from offsphere.search.stores import open_store
from offsphere.search.stores.chroma import HNSW
from offsphere.search.stores.store import Record, Stamp
from offsphere.search.verify import Verification, verify
from offsphere.similarity import Similarity, norms

COUNT = 200
COSINE = Similarity.parse("cosine")
EMBEDDED = ["chroma", "faiss", "lancedb", "milvus", "parquet", "qdrant"]


@pytest.fixture
def collection(tmp_path, sentences) -> str:
    """A collection of 200 documents, half of them with a title, whose ids are numbers, and 30 queries."""
    folder = tmp_path / "collection"
    (folder / "qrels").mkdir(parents=True)
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for number, text in enumerate(sentences(COUNT, 0)):
            title = "bee dance honey" if number % 2 else ""
            file.write(json.dumps({"_id": str(number), "title": title, "text": text}) + "\n")
    with (folder / "queries.jsonl").open("w", encoding="utf-8") as file:
        for number, text in enumerate(sentences(30, 1)):
            file.write(json.dumps({"_id": f"q{number}", "text": text}) + "\n")
    rows = "".join(f"q{number}\t{number}\t1\n" for number in range(30))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows, encoding="utf-8")
    return str(folder)


@pytest.fixture
def model(static, save) -> str:
    """A static encoder with prompts, which says that it ranks by dot."""
    static.prompts.update(query="query : ", document="passage : ")
    static.similarity_fn_name = "dot"
    return str(save(static, "static"))


@pytest.fixture
def exported(model, collection, target) -> Callable[..., str]:
    """Exports the collection and gives the target."""

    def export_to(kind: str, similarity: str | None = None, source: str | None = None) -> str:
        documents = EncodedDocuments(open_bare(source or model, None, None, "cpu"), [collection], similarity)
        export(documents, [target(kind)])
        return target(kind)

    return export_to


@pytest.fixture
def embedded(model, collection) -> tuple[list[str], np.ndarray]:
    """Ids and raw embeddings of the documents, as the model gives them."""
    documents = EncodedDocuments(open_bare(model, None, None, "cpu"), [collection])
    (batch,) = documents.batches(COUNT)
    return [one.id for one in batch.documents], batch.embed(range(COUNT))


def documents_of(collection: str) -> list[tuple[str, str]]:
    """The titles and texts."""
    lines = Path(collection, "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return [(one["title"], one["text"]) for one in map(json.loads, lines)]


def passages(collection: str) -> list[str]:
    return [f"{title} {text}".strip() for title, text in documents_of(collection)]


@pytest.fixture
def stored(collection, target, embedded) -> Callable[..., str]:
    """Writes vectors of one's own under a stamp, into an inner-product collection."""

    def store(vectors: np.ndarray, kind: str = "parquet", similarity: str = "dot", ids: list[str] | None = None) -> str:
        opened = open_store(target(kind))
        opened.create(vectors.shape[1], Stamp(Similarity.parse(similarity), "x", "passage : "))
        names = embedded[0][: len(vectors)] if ids is None else ids
        opened.write(
            [
                Record(one, row.astype(np.float32), 1.0, *said)
                for one, row, said in zip(names, vectors, documents_of(collection)[: len(vectors)], strict=True)
            ]
        )
        opened.close()
        return target(kind)

    return store


@pytest.fixture
def check(model, collection) -> Callable[..., Verification]:
    def check(target: str, source: str | None = None, **options) -> Verification:
        return verify(target, source or model, collection, device="cpu", **options)

    return check


def causes(found: Verification) -> list[str]:
    return [cause.name for cause in found.causes if cause.name != "stamp"]


@pytest.mark.parametrize("kind", EMBEDDED)
@pytest.mark.parametrize("similarity", ["dot", "gamma_q=0.2,gamma_d=0.6"])
def test_our_exports_rank_as_the_model(kind, similarity, exported, check):
    found = check(exported(kind, similarity), similarity=similarity)
    assert found.passed and found.causes == [] and found.metric == "ip"
    assert (found.overlap, found.tau, found.same_scores, found.present) == (1.0, pytest.approx(1.0), 1.0, 1.0)
    assert (found.documents, found.encoded, found.stored, found.queries) == (COUNT, COUNT, COUNT, 30)
    assert json.loads(json.dumps(found.to_dict()))["passed"] is True


def test_documents_without_text_belong_into_no_collection(exported, check, collection):
    """T-I2: an export that leaves them out is complete; a zero vector takes the places of negative scores."""
    with Path(collection, "corpus.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"_id": "empty", "title": "", "text": " "}\n')
    target = exported("parquet")
    found = check(target)
    assert found.passed and (found.documents, found.stored, found.extra, found.missing) == (COUNT, COUNT, 0, [])
    store = open_store(target)
    store.write([Record("empty", np.zeros(store.dimension(), np.float32), 0.0)])
    store.close()
    assert check(target).extra == 1

    rows = [{"_id": str(number), "text": ""} for number in range(30)]
    Path(collection, "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(DataError, match="no document has text; there is nothing to verify"):
        check(target)


def test_the_similarities_rank_this_collection_apart(embedded, model, collection):
    # Otherwise a destination that normalises would pass.
    queries = encode(open_bare(model, None, None, "cpu").model, ["sea salt", "why is fire hot"], "query")
    best = {
        name: Similarity.parse(name).scores(queries, embedded[1]).argsort(axis=1)[:, -10:] for name in ("dot", "cosine")
    }
    assert not np.array_equal(np.sort(best["dot"]), np.sort(best["cosine"]))


def by_hand(target: str, metric: str, ids: list[str], vectors: np.ndarray) -> None:
    """A collection of a metric, made with the engine's own client, by somebody who never heard of us."""
    kind, _, rest = target.partition(":")
    vectors = vectors.astype(np.float32)
    if kind == "chroma":
        import chromadb
        from chromadb.config import Settings

        client = chromadb.PersistentClient(rest, settings=Settings(anonymized_telemetry=False))
        space = {"hnsw": {**HNSW, "space": metric}}  # the default graph misses documents now and then
        made = client.create_collection("documents", embedding_function=None, configuration=space)
        made.add(ids=ids, embeddings=vectors)
        client.close()
    elif kind == "qdrant":
        import qdrant_edge as edge

        folder = Path(rest, "documents")
        folder.mkdir(parents=True)
        distance = {"ip": edge.Distance.Dot, "cosine": edge.Distance.Cosine, "l2": edge.Distance.Euclid}[metric]
        shard = edge.EdgeShard.create(
            str(folder), edge.EdgeConfig(vectors=edge.EdgeVectorParams(size=vectors.shape[1], distance=distance))
        )
        points = [edge.Point(int(one), row.tolist(), {}) for one, row in zip(ids, vectors, strict=True)]
        shard.update(edge.UpdateOperation.upsert_points(points))
        shard.flush()
        shard.close()
    elif kind == "milvus":
        from pymilvus import MilvusClient

        Path(rest).parent.mkdir(parents=True)
        client = MilvusClient(rest)
        client.create_collection(
            "documents",
            dimension=vectors.shape[1],
            metric_type={"ip": "IP", "cosine": "COSINE", "l2": "L2"}[metric],
            id_type="string",
            max_length=100,
        )
        client.insert("documents", [{"id": one, "vector": row.tolist()} for one, row in zip(ids, vectors, strict=True)])
        client.close()
    elif kind == "lancedb":
        import lancedb

        lancedb.connect(rest).create_table(
            "documents", [{"id": one, "vector": row.tolist()} for one, row in zip(ids, vectors, strict=True)]
        )


@pytest.mark.parametrize("kind", ["chroma", "qdrant", "milvus"])
@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_a_collection_of_another_metric_fails(kind, metric, target, embedded, check):
    by_hand(target(kind), metric, *embedded)
    found = check(target(kind))
    assert not found.passed and found.metric == metric and found.overlap < 0.95 and found.present == 1.0
    assert "metric" in causes(found)
    (cause,) = [cause for cause in found.causes if cause.name == "metric"]
    assert f"compares by {metric}, expected ip" in cause.sentence


@pytest.mark.parametrize("kind", ["chroma", "qdrant", "milvus", "lancedb"])
def test_vectors_that_were_normalised_by_hand_fail(kind, target, embedded, check):
    ids, raw = embedded
    by_hand(target(kind), "ip", ids, COSINE.prepare_document(raw))
    found = check(target(kind))
    assert not found.passed and causes(found) == ["normalised"]


@pytest.mark.parametrize("kind", ["chroma", "qdrant", "milvus", "lancedb"])
def test_a_right_collection_made_by_hand_passes(kind, target, embedded, check):
    by_hand(target(kind), "ip", *embedded)
    found = check(target(kind))
    assert found.passed and found.overlap == 1.0, found


def test_normalised_vectors_are_right_for_a_cosine_model(target, embedded, check):
    ids, raw = embedded
    by_hand(target("qdrant"), "cosine", ids, raw)
    assert check(target("qdrant"), similarity="cosine").passed
    assert not check(target("qdrant"), similarity="dnorm").passed  # the order stays, the scores do not


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda raw: Similarity(0.0, 0.5).prepare_document(raw), "gamma"),
        (
            lambda raw: (
                np.rint(raw / np.abs(raw).max(axis=1, keepdims=True) * 127)
                * np.abs(raw).max(axis=1, keepdims=True)
                / 127
            ),
            "quantised",
        ),
        (lambda raw: np.roll(raw, 1, axis=0), "ids"),
        (lambda raw: raw[:, ::-1], "model"),
        (lambda raw: raw[:, :8], "dimension"),
        (lambda raw: raw[:, :3] - 1, "dimension"),
        (lambda raw: raw * 2, "scaled"),
        (lambda raw: raw[:150], "missing"),
    ],
)
def test_what_is_wrong_with_stored_vectors_is_named(change, cause, stored, embedded, check):
    found = check(stored(change(embedded[1])))
    assert not found.passed and causes(found)[0] == cause


def test_half_precision_is_named_where_its_scores_differ(stored, embedded, check):
    found = check(stored(embedded[1].astype(np.float16)))
    assert found.overlap > 0.99 and found.same_scores > 0.8
    assert found.passed or causes(found) == ["quantised"]


def test_a_missing_prompt_is_named(stored, collection, static, check):
    found = check(stored(encode(static, passages(collection), "document", prompt="")))
    assert not found.passed and causes(found) == ["prompt"]
    assert "encoded with no prompt, expected the prompt 'passage : '" in found.causes[-1].sentence


def test_missing_titles_are_named(stored, collection, static, check, sentences):
    found = check(stored(encode(static, sentences(COUNT, 0), "document", prompt="passage : ")))
    assert not found.passed and causes(found) == ["title"]


def test_another_pooling_is_named(transformer, save, collection, target, stored, check):
    transformer.similarity_fn_name = "dot"
    source = str(save(transformer, "bert"))
    transformer[1].pooling_mode = "cls"
    found = check(stored(encode(transformer, passages(collection), "document", prompt="")), source)
    assert not found.passed and causes(found) == ["pooling"] and "cls pooling" in found.causes[-1].sentence


def test_another_length_limit_is_named(transformer, save, collection, stored, check):
    transformer.similarity_fn_name = "dot"
    source = str(save(transformer, "bert"))
    found = check(stored(encode(transformer, passages(collection), "document", prompt="")), source, max_length=4)
    assert (
        not found.passed and causes(found) == ["max_length"] and "after 48 tokens, not 4" in found.causes[-1].sentence
    )


def test_changed_and_extra_documents_are_told(exported, collection, check):
    target = exported("lancedb")
    lines = Path(collection, "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    lines[3] = json.dumps({"_id": "3", "title": "", "text": "fire fire fire star"})
    Path(collection, "corpus.jsonl").write_text("\n".join(lines[:190]), encoding="utf-8")
    found = check(target)
    assert not found.passed and found.extra == 10
    assert {"changed", "extra"} <= set(causes(found))
    assert "(such as '3')" in " ".join(cause.sentence for cause in found.causes)


def test_nothing_of_ours_is_stored(stored, embedded, check):
    found = check(stored(embedded[1][:5], ids=[f"other{number}" for number in range(5)]))
    assert not found.passed and (found.present, found.extra, found.encoded) == (0.0, 5, 0)
    assert causes(found) == ["missing", "extra"]


def test_a_graph_that_misses_documents_is_told(target, embedded, check):
    import chromadb
    from chromadb.config import Settings

    ids, raw = embedded
    client = chromadb.PersistentClient(
        target("chroma").removeprefix("chroma:"), settings=Settings(anonymized_telemetry=False)
    )
    poor = {"hnsw": {"space": "ip", "max_neighbors": 2, "ef_construction": 2, "ef_search": 10}}
    made = client.create_collection("documents", embedding_function=None, configuration=poor)
    made.add(ids=ids, embeddings=raw)
    client.close()
    found = check(target("chroma"))
    assert found.overlap < 0.99 <= found.tau and found.same_scores == 1.0
    assert not found.passed and causes(found) == ["recall"]
    assert check(target("chroma"), threshold=0.05).passed  # the graph answers a little differently each time


@pytest.mark.parametrize("kind", ["parquet", "lancedb"])
def test_a_sample_encodes_what_matters_to_the_queries(kind, exported, check, stored, embedded):
    found = check(exported(kind), sample=10, queries=3)
    assert found.passed and 10 <= found.encoded <= 10 + 2 * 3 * 10 < COUNT and found.queries == 3


def test_a_sample_sees_what_concerns_all_documents(stored, embedded, check):
    found = check(stored(COSINE.prepare_document(embedded[1])), sample=20, queries=5)
    assert not found.passed and causes(found) == ["normalised"] and found.encoded < COUNT


def test_a_sample_encodes_what_is_missing(stored, embedded, check):
    found = check(stored(embedded[1][:150]), sample=5, queries=10)
    assert not found.passed and causes(found) == ["missing"] and found.encoded >= 50
    assert found.missing == ["150", "151", "152", "153", "154"] and found.present == 0.75


def test_a_saved_qnorm_model_says_dot_and_the_stamp_knows(exported, check):
    found = check(exported("parquet", "qnorm"))
    assert found.passed and found.similarity == "qnorm"


def test_a_stamp_of_another_similarity_does_not_excuse(exported, check):
    found = check(exported("parquet", "cosine"))
    assert not found.passed and found.similarity == "dot"
    assert [cause.name for cause in found.causes] == ["stamp", "normalised"]


def test_the_same_seed_draws_the_same_queries(exported, check):
    target = exported("parquet")
    assert check(target, queries=7, seed=3) == check(target, queries=7, seed=3)


def test_what_cannot_be_verified(target, check, static, save, collection, stored, embedded):
    with pytest.raises(StoreError, match="there is no collection at"):
        check(target("lancedb"))
    for options in ({"threshold": 0.0}, {"threshold": 1.1}, {"sample": 0}):
        with pytest.raises(ConfigError):
            check(target("lancedb"), **options)
    by_hand(target("lancedb"), "ip", *embedded)
    silent = save(static, "silent")
    settings = silent / "config_sentence_transformers.json"
    declared = json.loads(settings.read_text(encoding="utf-8"))
    settings.write_text(json.dumps(declared | {"similarity_fn_name": None}), encoding="utf-8")
    with pytest.raises(UsageError, match="does not say which similarity"):
        check(target("lancedb"), str(silent))
    assert norms(embedded[1]).std() > 0.1  # a canary: lengths differ
