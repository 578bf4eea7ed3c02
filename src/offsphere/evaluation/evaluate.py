"""A model on collections and sentence pairs: rows for ``results.csv``, values per query, and its lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from offsphere.data import load_collection
from offsphere.data.scored_pairs import ScoredPairs, load_scored_pairs
from offsphere.encoders import declared_similarity, open_encoder, strip_normalize
from offsphere.errors import UsageError
from offsphere.evaluation.cross_table import score_under
from offsphere.evaluation.embedding import embed
from offsphere.evaluation.measures import MEASURES, parse_measures
from offsphere.evaluation.norms import norm_record
from offsphere.evaluation.ranking import EmbeddedCollection, rank, write_trec
from offsphere.evaluation.results import PRETRAINED, QueryValue, Result, write_query_values, write_results
from offsphere.evaluation.sts import embed_pairs, evaluate_pairs
from offsphere.progress import Progress, Silent
from offsphere.similarity import LEARNABLE, Similarity


@dataclass(frozen=True)
class Subject:
    """What is evaluated, as the rows of ``results.csv`` name it.

    Attributes:
        model: The encoder, as the user named it.
        training_data: What it was trained on here; empty for an encoder as it came.
        trained_as: The similarity of the training, or ``pretrained``.
        similarity: Its own similarity, learned gammas included.
        seed: Of the training, if there was one.
    """

    model: str
    training_data: str
    trained_as: str
    similarity: Similarity
    seed: int | None

    def result(self, scored_as: str, dataset: str, split: str, measure: str, value: float, number: int) -> Result:
        """A row of ``results.csv`` on this subject; the arguments are the columns of these names.

        Args:
            scored_as: The similarity that ranked.
            dataset: What was evaluated on.
            split: The part of it.
            measure: What was measured.
            value: The outcome.
            number: How many queries, or sentence pairs, it covers.
        """
        return Result(
            model=self.model,
            training_data=self.training_data,
            similarity=self.trained_as,
            gamma_q=self.similarity.gammas[0],
            gamma_d=self.similarity.gammas[1],
            scored_as=scored_as,
            seed=self.seed,
            dataset=dataset,
            split=split,
            measure=measure,
            value=value,
            n_queries=number,
        )


@dataclass(frozen=True)
class Evaluation:
    """Everything that one pass over one collection measured.

    Attributes:
        results: One row a measure and ranking.
        query_values: One value a measure and query, ranked by the model's own similarity.
        norms: See ``evaluation.norms``.
    """

    results: list[Result]
    query_values: list[QueryValue]
    norms: dict[str, Any]


def evaluate(
    embedded: EmbeddedCollection,
    subject: Subject,
    scored_as: Mapping[str, Similarity],
    measures: tuple[str, ...] = MEASURES,
) -> Evaluation:
    """The measures of one model on one collection, ranked under several similarities from one set of embeddings.

    Args:
        embedded: Raw embeddings of the collection.
        subject: Whose they are.
        scored_as: What to rank under, by the name in ``results.csv``. The model's own similarity is ranked as well.
        measures: Names that ir-measures knows.
    """
    collection = embedded.collection
    own = subject.similarity.name
    values = score_under(embedded, {**scored_as, own: subject.similarity}, measures).values
    results = [
        subject.result(name, collection.name, collection.split, measure, fmean(per_query.values()), len(per_query))
        for name, by_measure in values.items()
        for measure, per_query in by_measure.items()
    ]
    query_values = [
        QueryValue(subject.model, subject.trained_as, subject.seed, collection.name, measure, query, value)
        for measure, per_query in values[own].items()
        for query, value in per_query.items()
    ]
    return Evaluation(results, query_values, norm_record(embedded))


OWN = "own"


def evaluate_encoder(
    source: str,
    data: Sequence[str],
    similarities: Sequence[str] = (OWN,),
    *,
    split: str = "test",
    measures: tuple[str, ...] = MEASURES,
    max_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
    device: str | None = None,
    strict: bool = False,
    out: Path | None = None,
    progress: Progress | None = None,
) -> list[Result]:
    """Rows for ``results.csv``: an encoder as it is, on each collection, ranked under each similarity.

    Args:
        source: The encoder (see ``open_encoder``).
        data: Collections, and files or folders of scored sentence pairs (see ``evaluation.sts``).
        similarities: ``own`` for the one that the model declares, or any similarity.
        split: Of the judgements.
        measures: Names that ir-measures knows; scored sentence pairs have their own.
        max_length: Tokens kept of each text.
        prompts: By side, in place of the model's own and of the collections'.
        device: Where to encode.
        strict: Refuse judgements of documents that the corpus lacks.
        out: Folder for ``results.csv``, ``per_query.parquet`` and a run file a collection and similarity.
        progress: Told what happens.

    Raises:
        ConfigError: If a similarity or a measure is unknown; found before any encoding.
        UsageError: If ``own`` is asked of a model that declares no similarity, or ``learnable`` of one without gammas.
    """
    progress = progress or Silent()
    parse_measures(measures)
    materials = [load_scored_pairs(one, split) or load_collection(one, split, strict=strict) for one in data]
    model = open_encoder(source, max_length=max_length, prompts=prompts, device=device)
    declared = declared_similarity(model)
    strip_normalize(model)
    asked = [asked_similarity(one, declared, source) for one in similarities]
    scored_as = {similarity.name: similarity for similarity in asked}
    subject = Subject(source, "", PRETRAINED, declared or next(iter(scored_as.values())), None)
    done = progress.start(f"evaluate {source}", len(materials))
    evaluations, rows = [], []
    for number, material in enumerate(materials, 1):
        if isinstance(material, ScoredPairs):
            rows += evaluate_pairs(embed_pairs(model, material), subject, scored_as)
            done(number)
            continue
        collection = material.without_prompts(prompts or ())
        for note in collection.notes:
            progress.say(f"note: {collection.name}: {note}")
        embedded = embed(model, collection)
        evaluations.append(evaluate(embedded, subject, scored_as, measures))
        rows += [row for row in evaluations[-1].results if row.scored_as in scored_as]
        if out is not None:
            (out / "runs").mkdir(parents=True, exist_ok=True)
            for name, similarity in scored_as.items():
                tag = f"{name}-{collection.name}"
                write_trec(rank(embedded, similarity), out / "runs" / f"{tag}.trec", tag)
        done(number)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_results(out / "results.csv", rows)
        write_query_values(out / "per_query.parquet", [row for one in evaluations for row in one.query_values])
    return rows


def asked_similarity(name: str, declared: Similarity | None, source: str) -> Similarity:
    """The similarity by this name, where ``own`` and ``learnable`` are the model's."""
    if name == OWN and declared is None:
        raise UsageError(
            f"{source} does not say which similarity it was trained with, and a guess would be a wrong result for some "
            "models; give one, such as --similarity cosine or --similarity dot"
        )
    if name == LEARNABLE and not (declared and declared.learned):
        raise UsageError(
            f"{source} carries no learned gammas; give exponents, such as --similarity gamma_q=0.5,gamma_d=0.5"
        )
    return declared if declared and name in (OWN, LEARNABLE) else Similarity.parse(name)
