"""Whether a live collection ranks as the trained model does, and if it does not, why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from offsphere.data import Collection, load_collection
from offsphere.data.documents import read_documents
from offsphere.diagnosis.subject import Encoder, open_bare
from offsphere.encoders import encode
from offsphere.errors import ConfigError, DataError, StoreError
from offsphere.evaluation.evaluate import OWN, asked_similarity
from offsphere.progress import Progress, Silent
from offsphere.search.agreement import Answer, answer, order_causes, score_causes
from offsphere.search.causes import Cause, vector_causes
from offsphere.search.exact import ExactSearch
from offsphere.search.expected import (
    AT_ONCE,
    REENCODED,
    SHOWN,
    Expected,
    document_causes,
    reference,
    stamp_causes,
    stored_causes,
    stored_digests,
)
from offsphere.search.stores import open_store
from offsphere.search.stores.store import Found, Stamp, Store
from offsphere.similarity import Similarity

K = 10


@dataclass(frozen=True)
class Verification:
    """How a live collection compares with the exact ranking by the model; shares are from 0 to 1.

    Attributes:
        target: The collection.
        model: The encoder.
        similarity: What the model ranks by.
        metric: What the collection says that it compares by.
        dimension: Of the collection.
        stored: Documents that the collection counts.
        documents: Documents of the data that have text.
        encoded: Of these, how many were encoded for the comparison: all of them unless a sample was asked for.
        queries: Queries that were searched.
        k: Documents asked for each.
        overlap: Mean share of the k best documents that the collection found, ties aside.
        tau: Mean Kendall's tau between the live order and the exact scores.
        same_scores: Share of live scores equal to the inner product, to 1e-4 of |q| |d|.
        present: Share of the documents of the data that are stored.
        missing: Some ids of those that are not.
        extra: Stored documents that the data lacks, or has without text.
        threshold: What each of the four shares must reach.
        passed: Whether they do, and the metric cannot rank otherwise.
        causes: What explains a difference, as far as it could be measured.
    """

    target: str
    model: str
    similarity: str
    metric: str
    dimension: int
    stored: int
    documents: int
    encoded: int
    queries: int
    k: int
    overlap: float
    tau: float
    same_scores: float
    present: float
    missing: list[str]
    extra: int
    threshold: float
    passed: bool
    causes: list[Cause] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, for JSON."""
        return asdict(self)


def verify(
    target: str,
    model: str,
    data: str,
    *,
    split: str = "test",
    queries: int | None = 200,
    sample: int | None = None,
    similarity: str | None = None,
    threshold: float = 0.99,
    prompts: Mapping[str, str] | None = None,
    max_length: int | None = None,
    batch_size: int = 64,
    device: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verification:
    """Search real queries in a live collection, and compare with the exact ranking by the model.

    Every document is encoded anew, so that nothing that the collection says is taken on trust. With ``sample``, only so
    many are, beside all that the collection found, all that should have been found by the stored vectors, and all that
    it lacks; the stored vectors stand in for the rest. That is cheap, and sees a fault of a few documents only by luck.

    Args:
        target: See ``open_store``.
        model: The trained encoder (see ``open_encoder``).
        data: The collection whose documents were exported, with queries.
        split: Whose queries are used.
        queries: How many of them at most, drawn at random; None for all.
        sample: Documents to encode; all when None.
        similarity: What the model ranks by; its own when None. A model that only says ``dot`` or ``cosine`` leaves
            gamma_q to the collection's stamp, where there is one.
        threshold: What overlap, tau, equal scores and the share of stored documents must reach.
        prompts: By side, in place of the model's own and of the collection's.
        max_length: Tokens kept of each text.
        batch_size: Texts in one forward pass.
        device: Where to encode.
        seed: Of the samples.
        progress: Told what happens.

    Raises:
        ConfigError: If the threshold is no share, or a sample is below 1.
        DataError: If the data is malformed, or no document has text.
        StoreError: If there is no such collection, or it cannot be read.
        UsageError: If nobody says what the model ranks by.
    """
    progress = progress or Silent()
    if not 0 < threshold <= 1:
        raise ConfigError(f"--threshold must be above 0 and at most 1, found {threshold:g}")
    if sample is not None and sample < 1:
        raise ConfigError(f"--sample must be at least 1, found {sample}")
    with closing(open_store(target)) as store:
        if not store.exists():
            raise StoreError(f"there is no collection at {target}; export to it first, or correct the name")
        collection = load_collection(data, split).without_prompts(prompts or ())
        documents = [document for document in read_documents(data) if document.passage]  # as export leaves them out
        if not documents:
            raise DataError("no document has text; there is nothing to verify", data)
        encoder = open_bare(model, max_length, prompts, device)
        stamp = store.stamp()
        ranks_by = _similarity(similarity, encoder, stamp)
        prompt = collection.prompts.get("document", encoder.model.prompts.get("document") or "")
        expected = Expected(target, encoder, ranks_by, documents, prompt, batch_size, progress)
        return _verify(store, expected, collection, queries, sample, threshold, seed)


def _similarity(asked: str | None, encoder: Encoder, stamp: Stamp | None) -> Similarity:
    """What the model ranks by. A saved qnorm model says dot, since both rank alike; the stamp knows gamma_q."""
    declared = encoder.declared
    if asked is None and stamp is not None:
        own = declared or stamp.similarity
        return stamp.similarity if stamp.similarity.gammas[1] == own.gammas[1] else own
    return asked_similarity(asked or OWN, declared, encoder.source)


def _verify(
    store: Store,
    expected: Expected,
    collection: Collection,
    n_queries: int | None,
    sample: int | None,
    threshold: float,
    seed: int,
) -> Verification:
    random = np.random.default_rng(seed)
    queries = _queries(expected, collection, n_queries, random)
    ids = [document.id for document in expected.documents]
    rows = {document: row for row, document in enumerate(ids)}
    digests = stored_digests(store, ids)
    missing = [document for document in ids if document not in digests]
    k = min(K, len(ids))
    metric, stored = store.metric(), store.count()
    values: dict[str, Any] = {
        "target": expected.target,
        "model": expected.encoder.source,
        "similarity": expected.similarity.name,
        "metric": metric,
        "dimension": store.dimension(),
        "stored": stored,
        "documents": len(ids),
        "queries": len(queries),
        "k": k,
        "present": 1 - len(missing) / len(ids),
        "missing": missing[:SHOWN],
        "extra": stored - (len(ids) - len(missing)),
        "threshold": threshold,
    }
    unlike = stamp_causes(store, expected)
    if values["dimension"] != queries.shape[1] or not digests:
        values |= {"overlap": 0.0, "tau": 0.0, "same_scores": 0.0, "passed": False}
        there = [row for row, document in enumerate(ids[:REENCODED]) if document in digests]
        if not there:
            lost = document_causes(expected, missing, digests, values["extra"])
            return Verification(**values, encoded=0, causes=[*unlike, *lost])
        raw, held = expected.embed(there), store.vectors([ids[row] for row in there])
        return Verification(
            **values, encoded=len(raw), causes=[*unlike, *vector_causes(raw, held, expected.similarity)]
        )

    live: list[list[Found]] = []
    for start in range(0, len(queries), AT_ONCE):
        live += store.search(queries[start : start + AT_ONCE], k)
    truth = reference(store, expected, queries, live, rows, missing, k, sample, random)
    least = ExactSearch(truth.prepared).search(queries, k)[1][:, k - 1]
    answers = [
        answer(found, query, rows, truth.prepared, float(worst), k)
        for found, query, worst in zip(live, queries, least, strict=True)
    ]
    shares = {
        "overlap": float(np.mean([one.overlap for one in answers])),
        "tau": _mean([one.tau for one in answers]),
        "same_scores": _mean([float(value) for one in answers for value in one.same_scores]),
    }
    agrees = min(*shares.values(), values["present"]) >= threshold
    # A table without an index has no metric of its own. Where no length is left, cosine is the inner product.
    fits = metric in ("ip", "none") or (metric == "cosine" and expected.similarity.gammas[1] == 1.0)
    values |= {**shares, "encoded": len(truth.rows), "passed": agrees and fits}
    if values["passed"]:
        return Verification(**values)
    causes = [
        *unlike,
        *stored_causes(store, expected, truth, digests, random),
        *_live_causes(store, queries, live, answers, metric),
        *document_causes(expected, missing, digests, values["extra"]),
    ]
    if not causes and shares["overlap"] < threshold:
        found = f"recall@{k} is {shares['overlap']:.3f} though vectors, order and scores are right"
        advice = "the approximate index misses documents: rebuild it with higher settings, or search exactly"
        causes = [Cause("recall", f"{found}; {advice}")]
    return Verification(**values, causes=causes)


def _queries(expected: Expected, collection: Collection, most: int | None, random: np.random.Generator) -> np.ndarray:
    """(Q, n) prepared queries, all or a sample."""
    texts = list(collection.queries.values())
    if most is not None and most < len(texts):
        texts = [texts[place] for place in sorted(random.choice(len(texts), most, replace=False))]
    prompt = collection.prompts.get("query")
    raw = encode(expected.encoder.model, texts, "query", prompt=prompt, batch_size=expected.batch_size)
    return expected.similarity.prepare_query(raw)


def _live_causes(
    store: Store, queries: np.ndarray, live: Sequence[Sequence[Found]], answers: Sequence[Answer], metric: str
) -> list[Cause]:
    """What is wrong with how the collection ranks the vectors that it holds."""
    looked_at = range(min(len(live), REENCODED))
    stored = [store.vectors([found.id for found in live[place]]) for place in looked_at if live[place]]
    asked = queries[[place for place in looked_at if live[place]]]
    return order_causes(asked, stored, metric) + score_causes(answers)


def _mean(values: Sequence[float]) -> float:
    """The mean of what is defined; 1 where nothing is, since nothing disagrees."""
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else 1.0
