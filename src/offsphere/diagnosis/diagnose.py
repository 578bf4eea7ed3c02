"""Before training, and after: does length tell relevance here, is the task symmetric, what to train with, how sure?"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from offsphere.diagnosis.advice import Facts, Recommendation, recommend
from offsphere.diagnosis.audit import Audit, audit
from offsphere.diagnosis.effect_size import (
    FEWEST_QUERIES,
    Effect,
    candidate_effect,
    collection_effect,
    text_length_correlation,
    without_text_length,
)
from offsphere.diagnosis.fisher import BATCH_SIZE, PAIRS_PER_DIMENSION, Fisher, Masked, fisher_information, too_few
from offsphere.diagnosis.material import Material, load_material
from offsphere.diagnosis.subject import Encoder, embed_material, open_bare
from offsphere.diagnosis.symmetry import Probe, is_symmetric, probe, symmetry_warning
from offsphere.diagnosis.variation import variation_ratios
from offsphere.encoders import encode, token_counts, token_limit
from offsphere.encoding.prompts import prompts_in_force
from offsphere.errors import DataError, RunError
from offsphere.evaluation.norms import norm_record
from offsphere.evaluation.ranking import EmbeddedCollection, rank
from offsphere.progress import Progress, Silent
from offsphere.similarity import NAMES, Similarity, norms

MOST_QUERIES = 2_560
"""Without an accelerator, so that a small transformer answers within two minutes on a laptop."""
MORE_DOCUMENTS = 640
"""Drawn beside the relevant ones."""
CANDIDATES = 100
PROBED = 100


@dataclass(frozen=True)
class LengthEffect:
    """Whether relevant documents are longer than irrelevant ones.

    Attributes:
        overall: Over the whole collection.
        within_candidates: Among the hundred best documents of each query by cosine, which a ranking decides between.
        without_text_length: Over the whole collection, after the part that the length of the text explains.
        text_length_correlation: Correlation of embedding length with log(tokens read); None where one does not vary.
    """

    overall: Effect
    within_candidates: Effect
    without_text_length: Effect
    text_length_correlation: float | None


@dataclass(frozen=True)
class Symmetry:
    """Whether query and document can change places.

    Attributes:
        task: Declared or detected.
        symmetric: Whether it is.
        evidence: How the task is known.
        warnings: What one-sided similarities would cost, by name; empty where the task is not symmetric.
        probe: Real pairs scored both ways, by similarity.
    """

    task: str
    symmetric: bool
    evidence: str
    warnings: dict[str, str]
    probe: dict[str, Probe]


@dataclass(frozen=True)
class Diagnosis:
    """What one encoding pass over one collection tells about length.

    Attributes:
        model: The encoder.
        dataset: The collection.
        split: Of its judgements.
        n_queries: Queries looked at.
        n_documents: Documents looked at.
        audit: What erases, distorts or caps length.
        norms: Histograms and statistics of lengths (see ``evaluation.norms``).
        effect: Cohen's d of document lengths.
        variation_ratios: CV dnorm-trained over dot-trained per dataset and side, of the run that was given.
        fisher: Condition of the gradients.
        symmetry: Of the task.
        recommendation: What to train with, and why.
    """

    model: str
    dataset: str
    split: str
    n_queries: int
    n_documents: int
    audit: Audit
    norms: dict[str, Any]
    effect: LengthEffect
    variation_ratios: dict[str, dict[str, float]]
    fisher: Fisher
    symmetry: Symmetry
    recommendation: Recommendation

    @property
    def normalize_module(self) -> bool:
        """Whether the encoder came with a Normalize module."""
        return bool(self.audit.normalize_modules)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis for JSON: plain dicts, lists and numbers, null for what is not known.

        ``cohens_d`` holds the overall effect, and inside it the other views; ``fisher`` one entry a similarity, and
        ``fisher_call`` the prediction and what it was made from.
        """
        overall, fisher = asdict(self.effect.overall), asdict(self.fisher)
        return {
            "model": self.model,
            "dataset": self.dataset,
            "split": self.split,
            "n_queries": self.n_queries,
            "n_documents": self.n_documents,
            "normalize_module": self.normalize_module,
            "norms": self.norms,
            "cohens_d": overall
            | {
                "within_candidates": asdict(self.effect.within_candidates),
                "without_text_length": asdict(self.effect.without_text_length),
                "text_length_correlation": self.effect.text_length_correlation,
            },
            "variation_ratios": self.variation_ratios,
            "fisher": fisher["spectra"],
            "fisher_call": fisher["call"] | {key: fisher[key] for key in ("n_pairs", "dimension", "batch_size")},
            "symmetry": asdict(self.symmetry),
            "audit": asdict(self.audit),
            "recommendation": asdict(self.recommendation),
        }


def diagnose(
    model_source: str,
    data: str,
    *,
    split: str | None = None,
    task: str | None = None,
    similarities: Sequence[str] = NAMES,
    max_queries: int | None = None,
    max_documents: int | None = None,
    max_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
    device: str | None = None,
    scale: float | Literal["auto"] = "auto",
    batch_size: int = BATCH_SIZE,
    run: Path | None = None,
    strict: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Diagnosis:
    """What length tells here, and which similarity to train with; one encoding pass, no training.

    Args:
        model_source: The encoder (see ``open_encoder``).
        data: A collection, training pairs, or scored sentence pairs (see ``load_material``).
        split: Of the data; the first of train, dev, test that there is, if None.
        task: What the model is for (see ``symmetry.SYMMETRIC``); detected if None.
        similarities: Whose gradients are looked at.
        max_queries: A random sample of the queries; if None, 10 a dimension, and on a CPU at most 2,560.
        max_documents: Their relevant documents and a random sample of others; 640 more than queries if None.
        max_length: Tokens kept of each text.
        prompts: By side, in place of the model's own and of the collection's.
        device: Where to encode.
        scale: The inverse temperature of the training to come.
        batch_size: Pairs a batch of the training to come.
        run: The folder of a finished comparison of this encoder, whose verdict then counts more than predictions.
        strict: Refuse judgements of texts that do not exist.
        seed: Of samples and resampling.
        progress: Told what happens.

    Raises:
        ConfigError: If a similarity or the task is unknown.
        DataError: If the data is malformed, or nothing in it is relevant.
        EncoderError: If the encoder cannot be opened, or an embedding is NaN or infinite.
        RunError: If ``run`` is no finished comparison.
    """
    progress = progress or Silent()
    parsed = {one.name: one for one in map(Similarity.parse, similarities)}
    before = _read_run(run)
    whole = load_material(data, split, task, prompts=prompts or (), strict=strict)
    encoder = open_bare(model_source, max_length, prompts, device)
    number = max_queries or _sample_size(encoder)
    material = whole.sample(number, max_documents or number + MORE_DOCUMENTS, seed)
    embedded = embed_material(encoder, material, progress)
    facts = _Measured(encoder, material, embedded, seed)
    audited = facts.audit()
    effect = facts.effect(audited)
    fisher = facts.fisher(parsed, scale, batch_size, progress)
    symmetry = facts.symmetry(parsed)
    record = norm_record(embedded)
    del record["cohens_d"]  # the effect says it, and says where it is not defined
    call = fisher.call
    advice = Facts(
        task=material.task,
        task_evidence=material.evidence,
        symmetric=symmetry.symmetric,
        unit_length=audited.query.unit_length and audited.document.unit_length,
        document_cv=record["document_cv"],
        effect=effect.within_candidates,
        call=call,
        **before,
    )
    return Diagnosis(
        model=model_source,
        dataset=material.collection.name,
        split=material.collection.split,
        n_queries=len(material.collection.queries),
        n_documents=len(material.collection.documents),
        audit=audited,
        norms=record,
        effect=effect,
        variation_ratios={} if run is None else variation_ratios(_json(run / "norms.json")),
        fisher=fisher,
        symmetry=symmetry,
        recommendation=recommend(advice),
    )


class _Measured:
    """The parts of a diagnosis, each from the same embeddings."""

    def __init__(self, encoder: Encoder, material: Material, embedded: EmbeddedCollection, seed: int):
        collection = material.collection
        self.encoder, self.material, self.embedded, self.seed = encoder, material, embedded, seed
        self.texts = {"query": [*collection.queries.values()], "document": [*collection.documents.values()]}
        self.prompts = prompts_in_force(encoder.model, collection.prompts).texts
        self.limit = token_limit(encoder.model)
        self.counts = {
            side: token_counts(encoder.model, [self.prompts[side] + text for text in texts])
            for side, texts in self.texts.items()
        }
        position = {document: place for place, document in enumerate(collection.documents)}
        judged = [
            (row, position[document])
            for row, grades in enumerate(collection.qrels[query] for query in collection.queries)
            for document, grade in grades.items()
            if grade > 0
        ]
        filled = {side: np.array([bool(text.strip()) for text in texts]) for side, texts in self.texts.items()}
        pairs = np.array(judged, dtype=np.int64).reshape(-1, 2)
        self.pairs = pairs[filled["query"][pairs[:, 0]] & filled["document"][pairs[:, 1]]]
        self.filled = filled["document"]
        if not len(self.pairs):
            raise DataError(f"{collection.name}: no relevant document has a text, or no query has one", collection.path)

    def audit(self) -> Audit:
        """What erases, distorts or caps length."""
        declared = self.encoder.declared
        return audit(
            self.texts,
            {"query": self.embedded.queries, "document": self.embedded.documents},
            self.counts,
            self.prompts,
            normalize_modules=self.encoder.normalize_modules,
            declared_similarity=declared.name if declared else None,
            max_length=self.limit,
        )

    def effect(self, audited: Audit) -> LengthEffect:
        """Cohen's d in its three views; not defined where all documents have one length."""
        lengths = norms(self.embedded.documents).astype(np.float64)
        if audited.document.unit_length:
            lengths = np.ones_like(lengths)  # what differs is rounding
        relevant = np.zeros(len(lengths), dtype=bool)
        relevant[[place for _, place in self.pairs]] = True
        irrelevant = np.flatnonzero(self.filled & ~relevant)
        read = np.minimum(np.maximum(1, self.counts["document"]), self.limit or np.inf)
        adjusted = lengths.copy()
        adjusted[self.filled] = without_text_length(lengths[self.filled], read[self.filled], relevant[self.filled])
        candidates = rank(self.embedded, Similarity.parse("cosine"), CANDIDATES).indices
        candidates[~self.filled[candidates]] = -1
        codes = np.arange(len(candidates))[:, None] * len(lengths) + candidates
        among = np.isin(codes, self.pairs @ [len(lengths), 1])
        return LengthEffect(
            overall=collection_effect(lengths, self.pairs, irrelevant, seed=self.seed),
            within_candidates=candidate_effect(lengths, candidates, among, seed=self.seed),
            without_text_length=collection_effect(adjusted, self.pairs, irrelevant, seed=self.seed),
            text_length_correlation=_known(text_length_correlation(lengths[self.filled], read[self.filled])),
        )

    def fisher(
        self,
        similarities: Mapping[str, Similarity],
        scale: float | Literal["auto"],
        batch_size: int,
        progress: Progress,
    ) -> Fisher:
        """Fisher information on the judged pairs, batched and masked as in training."""
        from offsphere.losses import resolve_scale

        queries, documents = (
            side[places]
            for side, places in zip((self.embedded.queries, self.embedded.documents), self.pairs.T, strict=True)
        )
        if (n_queries := len(np.unique(self.pairs[:, 0]))) < FEWEST_QUERIES:
            return too_few(len(queries), queries.shape[1], f"{n_queries} queries, at least {FEWEST_QUERIES} needed")
        lengths = norms(queries), norms(documents)
        return fisher_information(
            queries,
            documents,
            similarities,
            {name: resolve_scale(scale, similarity, *lengths) for name, similarity in similarities.items()},
            batch_size=batch_size,
            masked=self._masked(),
            seed=self.seed,
            on_pairs=progress.start("gradients", len(queries)),
        )

    def symmetry(self, similarities: Mapping[str, Similarity]) -> Symmetry:
        """The task, and real pairs scored both ways."""
        task = self.material.task
        drawn = self.pairs[np.random.default_rng(self.seed).permutation(len(self.pairs))[:PROBED]]
        firsts, seconds = (
            [self.texts[side][place] for place in places] for side, places in zip(self.texts, drawn.T, strict=True)
        )
        swapped = [
            encode(self.encoder.model, seconds, "query", prompt=self.material.collection.prompts.get("query")),
            encode(self.encoder.model, firsts, "document", prompt=self.material.collection.prompts.get("document")),
        ]
        warned = {name: symmetry_warning(task, similarity) for name, similarity in similarities.items()}
        return Symmetry(
            task=task,
            symmetric=is_symmetric(task),
            evidence=self.material.evidence,
            warnings={name: warning for name, warning in warned.items() if warning},
            probe=probe(self.embedded.queries[drawn[:, 0]], self.embedded.documents[drawn[:, 1]], *swapped),
        )

    def _masked(self) -> Masked:
        """What the loss would mask: the same text, another positive of the same query, or a judged pair."""
        import torch

        from offsphere.losses import KnownPositives, known_positive_mask

        keys = [_keys(self.texts[side]) for side in ("query", "document")]
        of_pairs = torch.from_numpy(np.stack([key[places] for key, places in zip(keys, self.pairs.T, strict=True)]))
        known = KnownPositives(map(tuple, of_pairs.T.tolist()), n_documents=len(self.texts["document"]))

        def masked(batches: np.ndarray) -> np.ndarray:
            queries, documents = of_pairs[:, torch.from_numpy(batches)]
            masks = [known_positive_mask(*batch, known) for batch in zip(queries, documents, strict=True)]
            return torch.stack(masks).numpy()

        return masked


def _sample_size(encoder: Encoder) -> int:
    enough = PAIRS_PER_DIMENSION * (encoder.model.get_embedding_dimension() or 0)
    return min(enough, MOST_QUERIES) if encoder.model.device.type == "cpu" else enough


def _keys(texts: Sequence[str]) -> np.ndarray:
    """An integer for each text, the same for equal texts."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)


def _read_run(run: Path | None) -> dict[str, Any]:
    """What a finished comparison adds to the facts."""
    if run is None:
        return {}
    verdict = _json(run / "comparison.json")["verdict"]
    ratios = [sides["query"] for sides in variation_ratios(_json(run / "norms.json")).values() if "query" in sides]
    return {
        "measured": verdict["similarity"],
        "measured_words": verdict["sentence"],
        "query_ratio": float(np.mean(ratios)) if ratios else None,
    }


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is missing; `offsphere compare --out {path.parent}` writes it at its end") from None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
