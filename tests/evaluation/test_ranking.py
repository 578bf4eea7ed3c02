from __future__ import annotations

import math

import numpy as np
import pytest
import pytrec_eval
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from offsphere.errors import ConfigError, DataError, EncoderError
from offsphere.evaluation import rank, read_trec, write_trec
from offsphere.similarity import Similarity

COSINE, DOT = Similarity.parse("cosine"), Similarity.parse("dot")
SIMILARITIES = [*map(Similarity.parse, ("cosine", "dot", "qnorm", "dnorm")), Similarity(0.3, 0.7)]


def slow_run(embedded, similarity, k):
    """The definition: every pair by itself in float64, rounded to float32, sorted by (score, id) descending."""
    collection, run = embedded.collection, {}
    for query, q in zip(collection.queries, embedded.queries.astype(float), strict=True):
        banned = set(collection.excluded.get(query, ())) | ({query} if collection.exclude_self else set())
        scored = [
            (float(np.float32(similarity.pairwise(q[None], d[None])[0])), document)
            for document, d in zip(collection.documents, embedded.documents.astype(float), strict=True)
            if document not in banned
        ]
        run[query] = {document: score for score, document in sorted(scored, reverse=True)[:k]}
    return run


def listed(run):
    return {query: list(documents.items()) for query, documents in run.items()}


@given(
    queries=arrays(np.int8, (3, 2), elements=st.integers(-2, 2)),
    documents=arrays(np.int8, (17, 2), elements=st.integers(-2, 2)),
    similarity=st.sampled_from(SIMILARITIES),
    k=st.integers(1, 20),
    block_size=st.integers(1, 18),
    exclude_self=st.booleans(),
    excluded=st.dictionaries(st.sampled_from(["q0", "q2"]), st.frozensets(st.sampled_from(["d1", "d9", "gone"]))),
)
@settings(max_examples=150, deadline=None)
def test_equals_the_definition_on_rankings_full_of_ties(
    embed, queries, documents, similarity, k, block_size, exclude_self, excluded
):
    ids = ["q0", *(f"d{i}" for i in range(1, 16)), "ä"]
    embedded = embed(queries, documents, document_ids=ids, exclude_self=exclude_self, excluded=excluded)
    ranking = rank(embedded, similarity, k, block_size=block_size)
    expected = slow_run(embedded, similarity, k)
    got = listed(ranking.run())
    for query, documents_of_query in listed(expected).items():
        assert [d for d, _ in got[query]] == [d for d, _ in documents_of_query]
        np.testing.assert_array_equal([s for _, s in got[query]], [s for _, s in documents_of_query])


@pytest.mark.parametrize("similarity", SIMILARITIES, ids=str)
def test_same_bits_for_every_block_size_and_order_of_the_corpus(embed, similarity):
    rng = np.random.default_rng(0)
    queries, documents = rng.normal(size=(7, 64)), rng.normal(size=(500, 64))
    documents[100:200] = documents[:100]  # ties
    expected = listed(rank(embed(queries, documents), similarity, 50).run())
    shuffled = rng.permutation(500)
    for block_size in (1, 3, 64, 499, 500, 10_000):
        assert listed(rank(embed(queries, documents), similarity, 50, block_size=block_size).run()) == expected
        moved = embed(
            queries,
            documents[shuffled],
            document_ids=[f"d{i}" for i in shuffled],
            qrels={f"q{i}": {"d0": 1} for i in range(7)},
        )
        assert listed(rank(moved, similarity, 50, block_size=block_size).run()) == expected


def test_order_of_ties_is_that_of_trec_eval(embed):
    ids = ["a", "Z", "10", "9", "é", "ﬀ", "𝄞", "a b", "aa"]
    ranking = rank(embed([[1.0]], np.ones((len(ids), 1)), document_ids=ids), DOT)
    run = ranking.run()
    for place, document in enumerate(run["q0"], start=1):
        evaluator = pytrec_eval.RelevanceEvaluator({"q0": {document: 1}}, {"recip_rank"})
        assert evaluator.evaluate(run)["q0"]["recip_rank"] == 1 / place


def test_renaming_documents_moves_only_ties(embed):
    rng = np.random.default_rng(1)
    queries, documents = rng.normal(size=(4, 8)), rng.normal(size=(40, 8))
    documents[20:] = documents[:20]
    before = rank(embed(queries, documents), DOT, 20)
    renamed = [f"{(i * 17) % 40:02d}" for i in range(40)]
    after = rank(embed(queries, documents, document_ids=renamed), DOT, 20)
    np.testing.assert_array_equal(before.scores, after.scores)
    np.testing.assert_array_equal(before.indices % 20, after.indices % 20)
    assert (before.indices != after.indices).any()  # there are ties to move


def test_equal_ids_drop_nothing_unless_the_collection_says_so(embed):
    ids = ["1", "2", "3"]
    vectors = np.eye(3)
    chance = rank(embed(vectors, vectors, query_ids=ids, document_ids=ids), COSINE, 2)
    assert [row[0] for row in chance.indices] == [0, 1, 2]
    declared = rank(embed(vectors, vectors, query_ids=ids, document_ids=ids, exclude_self=True), COSINE, 2)
    assert all(query not in documents for query, documents in declared.run().items())
    assert (declared.indices >= 0).all()  # refilled to k


def test_exclusions_are_refilled_and_a_short_list_is_padded(embed):
    embedded = embed([[1.0]], np.arange(1, 6)[:, None], excluded={"q0": frozenset({"d4", "d3", "not there"})})
    assert list(rank(embedded, DOT, 2).run()["q0"]) == ["d2", "d1"]
    padded = rank(embedded, DOT, 5)
    assert padded.indices.tolist() == [[2, 1, 0, -1, -1]]
    assert padded.scores.tolist() == [[3, 2, 1, -math.inf, -math.inf]]
    assert padded.indices.dtype == np.int64 and padded.scores.dtype == np.float32
    assert list(padded.run()["q0"]) == ["d2", "d1", "d0"]


@pytest.mark.parametrize("similarity", SIMILARITIES, ids=str)
def test_a_zero_document_scores_zero(embed, similarity):
    ranking = rank(embed([[1.0, 0.0]], [[-1.0, 0.0], [0.0, 0.0], [2.0, 0.0]]), similarity)
    assert ranking.indices[0, :3].tolist() == [2, 1, 0]
    assert ranking.scores[0, 1] == 0


def test_a_document_without_text_is_no_answer(embed):  # T-I2: 0 would be the best score here
    texts = {"d0": "text", "d1": " ", "d2": "text"}
    vectors = [[-2.0, 0.0], [0.0, 0.0], [-1.0, 0.0]]
    for similarity in SIMILARITIES:
        ranking = rank(embed([[1.0, 0.0]], vectors, texts=texts, excluded={"q0": frozenset({"d1"})}), similarity, 3)
        assert sorted(ranking.run()["q0"]) == ["d0", "d2"]
        assert "d1" in rank(embed([[1.0, 0.0]], vectors), similarity, 3).run()["q0"], "canary"


def test_products_too_small_for_float32_tie_whatever_their_sign(embed):
    ranking = rank(embed([[1e-30]], [[1e-30], [-1e-30], [0.0]]), DOT, 3)
    assert ranking.scores.tolist() == [[0, 0, 0]]
    assert ranking.indices.tolist() == [[2, 1, 0]]


def test_ranking_is_stateless(embed):
    rng = np.random.default_rng(2)
    embedded = embed(rng.normal(size=(5, 4)), rng.normal(size=(30, 4)) * rng.uniform(0.1, 9, (30, 1)))
    first = [listed(rank(embedded, similarity).run()) for similarity in (COSINE, DOT)]
    second = [listed(rank(embedded, similarity).run()) for similarity in (DOT, COSINE)]
    assert first == second[::-1]
    assert [list(dict(d)) for d in first[0].values()] != [list(dict(d)) for d in first[1].values()]


def test_broken_embeddings_are_named(embed):
    with pytest.raises(EncoderError, match=r"2 of 4 document embeddings of made are NaN or infinite, such as 'd1'"):
        embed([[1.0]], [[1.0], [math.nan], [math.inf], [0.0]])
    with pytest.raises(EncoderError, match=r"1 of 1 query embeddings"):
        embed([[math.nan]], [[1.0]])
    with pytest.raises(EncoderError, match=r"shape \(2, 1\); expected \(3, dimension\)"):
        embed([[1.0]], [[1.0], [2.0]], document_ids=["a", "b", "c"])
    with pytest.raises(EncoderError, match="2 dimensions and documents 1"):
        embed([[1.0, 2.0]], [[1.0]])
    with pytest.raises(ConfigError, match="found 0"):
        rank(embed([[1.0]], [[1.0]]), COSINE, 0)


def test_run_files_read_back_exactly(embed, tmp_path):
    rng = np.random.default_rng(3)
    ranking = rank(embed(rng.normal(size=(6, 5)), rng.normal(size=(80, 5)) * 1e-3), DOT, 30)
    path = tmp_path / "made.trec"
    write_trec(ranking, path, "dot")
    assert listed(read_trec(path)) == listed(ranking.run())
    assert [file.name for file in tmp_path.iterdir()] == ["made.trec"]
    with path.open(encoding="utf-8") as file:
        query, zero, document, place, score, tag = next(file).split()
    assert (query, zero, document, place, tag) == ("q0", "Q0", next(iter(ranking.run()["q0"])), "1", "dot")
    assert np.float32(score) == ranking.scores[0, 0]


def test_a_run_file_from_windows_reads_the_same(embed, tmp_path):
    """With a byte order mark before the first query, and a carriage return behind every tag."""
    written, other = tmp_path / "made.trec", tmp_path / "windows.trec"
    write_trec(rank(embed([[1.0, 2.0], [2.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]), DOT), written, "dot")
    content = written.read_bytes()
    other.write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"))
    assert len(other.read_bytes()) == len(content) + 3 + 4, "canary"
    assert listed(read_trec(other)) == listed(read_trec(written))
    assert set(read_trec(other)) == {"q0", "q1"}


def test_ids_that_a_run_file_cannot_hold_are_refused(embed, tmp_path):
    with pytest.raises(DataError, match="'a b' is empty or holds white space"):
        write_trec(rank(embed([[1.0]], [[1.0]], document_ids=["a b"]), DOT), tmp_path / "run", "x")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q Q0 d 1 0.5", "run:2: expected `query Q0 document rank score tag`, found 'q Q0 d 1 0.5'"),
        ("", "run:2: expected"),
        ("q Q0 d 1 high x", "run:2: expected a finite score, found 'high'"),
        ("q Q0 d 1 nan x", "run:2: expected a finite score"),
        ("q Q0 first 2 0.5 x", "run:2: document 'first' comes twice for query 'q'"),
    ],
)
def test_malformed_run_files_are_named_with_their_line(tmp_path, line, message):
    path = tmp_path / "run"
    path.write_text(f"q Q0 first 1 1.0 x\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError) as error:
        read_trec(path)
    assert message in str(error.value)


def test_a_missing_run_file_is_named(tmp_path):
    with pytest.raises(DataError, match="no such run file"):
        read_trec(tmp_path / "absent")
