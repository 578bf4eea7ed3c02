"""Encoders on data sets, under any similarities: one encoding pass for each, kept as soon as it is finished."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from offsphere.atomic import write_atomically
from offsphere.data import Collection, available_splits, load_collection
from offsphere.data.beir import is_collection
from offsphere.data.benchmarks import expand, find_benchmark
from offsphere.data.fingerprint import digest
from offsphere.data.scored_pairs import ScoredPairs, load_scored_pairs
from offsphere.encoders import declared_similarity, model_fingerprint, open_encoder, strip_normalize
from offsphere.encoding.cache import cache_at_hand
from offsphere.encoding.prompts import Prompts, prompts_in_force
from offsphere.errors import ConfigError
from offsphere.evaluation.compare_runs import RunComparison, compare_values
from offsphere.evaluation.correlation import COSINE, Point, points_of
from offsphere.evaluation.embedding import embed
from offsphere.evaluation.evaluate import OWN, Evaluation, Subject, asked_similarity, evaluate
from offsphere.evaluation.measures import MEASURES, all_judgements, ceilings, parse_measures, per_query
from offsphere.evaluation.parts import Part, Parts, slug
from offsphere.evaluation.ranking import EmbeddedCollection, rescored, write_trec
from offsphere.evaluation.results import PRETRAINED, QueryValue, Result, write_query_values, write_results
from offsphere.evaluation.scopes import scopes_of
from offsphere.evaluation.sts import embed_pairs, evaluate_pairs
from offsphere.progress import Progress, Silent
from offsphere.similarity import Similarity
from offsphere.training.run_folder import describe_environment

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

ALL_JUDGED = "(all judged)"
"""Behind the name of a measure that also counts judgements of documents that the corpus lacks, as trec_eval does."""
CEILING = "(ceiling)"
"""Behind the name of a measure: the most that a ranking of this corpus can reach when those count."""


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found.

    Attributes:
        results: Rows for ``results.csv``.
        measure: The first one, which decides comparisons and points, as ir-measures prints it.
        comparisons: By encoder, every similarity against the first one; where there are two.
        points: Cohen's d against the gain on cosine, by encoder, similarity and collection; where cosine was asked for.
    """

    results: list[Result]
    measure: str
    comparisons: dict[str, RunComparison]
    points: list[Point]


@dataclass(frozen=True)
class _Encoder:
    """An open encoder and what was asked of it."""

    model: SentenceTransformer
    prompts: Prompts
    subject: Subject
    scored_as: dict[str, Similarity]
    request: dict[str, Any]


def evaluate_models(
    sources: Sequence[str],
    data: Sequence[str],
    similarities: Sequence[str] = (OWN,),
    *,
    split: str = "test",
    measures: tuple[str, ...] = MEASURES,
    max_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
    task_prompts: bool = False,
    device: str | None = None,
    strict: bool = False,
    seed: int = 0,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Evaluated:
    """Encoders as they are, on each data set, ranked under each similarity.

    With ``out``, every data set is kept once it is finished: the same request, or one with more encoders or data sets,
    goes on from there. Another similarity, measure or limit encodes again.

    Args:
        sources: The encoders (see ``open_encoder``).
        data: Collections, names of benchmarks or of families of them (see ``data.benchmarks``), and files or folders
            of scored sentence pairs (see ``evaluation.sts``).
        similarities: ``own`` for the one that a model declares, or any similarity. The first is what the others are
            tested against.
        split: Of the judgements; ``test`` is whatever a benchmark is published on.
        measures: Names that ir-measures knows, or ``AllSupports@k``; scored sentence pairs have their own.
        max_length: Tokens kept of each text.
        prompts: By side, in place of the model's own and of the collections'.
        task_prompts: Put the prompt that a benchmark's task comes with before its queries.
        device: Where to encode.
        strict: Refuse judgements of documents that the corpus lacks, and benchmarks of another size.
        seed: Of the resampling in tests.
        out: Folder for ``results.csv``, ``per_query.parquet``, ``environment.json`` and a run file an encoder,
            collection and similarity.
        progress: Told what happens.

    Raises:
        ConfigError: If a similarity or a measure is unknown, or two encoders or collections share a name; found before
            any encoding.
        UsageError: If ``own`` is asked of a model that declares no similarity, or ``learnable`` of one without gammas.
        DataError: If data cannot be read, or has no such split; a missing file or split is found before any encoding.
    """
    progress = progress or Silent()
    deciding = str(parse_measures(measures)[0])
    data = list(chain.from_iterable(map(expand, data)))
    for one in data:
        _check(one, split)
    names = [slug(source) for source in sources]
    if twice := next((source for source in sources if names.count(slug(source)) > 1), None):
        raise ConfigError(f"two encoders would be called {slug(twice)!r} in file names; evaluate them apart")
    parts = None if out is None else Parts(out)
    found: dict[str, list[Part]] = {}
    in_force: dict[str, dict[str, Prompts]] = {}
    for source in sources:
        encoder = _open(source, similarities, measures, max_length, prompts, device, progress)
        done = progress.start(f"evaluate {source}", len(data))
        finished: dict[str, Part] = {}
        for number, one in enumerate(data, 1):
            material = load_scored_pairs(one, split) or load_collection(one, split, strict=strict)
            if material.name in finished:
                raise ConfigError(f"two data sets are called {material.name!r}; name one in its collection.yaml")
            standing = encoder.prompts
            if isinstance(material, Collection):
                if task_prompts and (benchmark := find_benchmark(one)) and benchmark.query_prompt:
                    material = replace(material, prompts=material.prompts | {"query": benchmark.query_prompt})
                material = material.without_prompts(prompts or ())
                for note in material.notes:
                    progress.say(f"note: {material.name}: {note}")
                if material.prompts:
                    standing = prompts_in_force(encoder.model, material.prompts)
                for said in (material.never_ranked(), standing.in_place_of(encoder.prompts)):
                    if said:
                        progress.say(f"{material.name}: {said}")
            in_force.setdefault(material.name, {})[source] = standing
            finished[material.name] = _part(encoder, material, measures, parts, progress)
            done(number)
        found[source] = [*finished.values()]
    results = list(chain.from_iterable(part.results for of_model in found.values() for part in of_model))
    comparisons = {
        source: compared for source in sources if (compared := _compare(found[source], deciding, split, seed))
    }
    points = list(chain.from_iterable(_points(source, found[source], deciding) for source in sources))
    if out is not None and parts is not None:
        _write(out, parts, found, in_force, results)
    return Evaluated(results, deciding, comparisons, points)


def _check(source: str, split: str) -> None:
    """Find a missing folder or split before any encoding; benchmarks by name are read when their turn comes."""
    folder = Path(source).expanduser()
    if find_benchmark(source) or (is_collection(folder) and split in available_splits(folder)):
        return
    if load_scored_pairs(source, split) is None:
        load_collection(source, split)  # says what is wrong


def _open(
    source: str,
    similarities: Sequence[str],
    measures: tuple[str, ...],
    max_length: int | None,
    prompts: Mapping[str, str] | None,
    device: str | None,
    progress: Progress,
) -> _Encoder:
    model = open_encoder(source, max_length=max_length, prompts=prompts, device=device)
    declared = declared_similarity(model)
    strip_normalize(model)
    asked = [asked_similarity(one, declared, source) for one in similarities]
    scored_as = {similarity.name: similarity for similarity in asked}
    declares = "declares no similarity" if declared is None else f"declares {declared.name}"
    others = [name for name in scored_as if declared is None or name != declared.name]
    if others:
        progress.say(f"{source} {declares}; ranked as {', '.join(others)} because --similarity asks for it")
    own_prompts = prompts_in_force(model)
    if own_prompts:
        progress.say(f"{source}: {own_prompts}")
    subject = Subject(source, "", PRETRAINED, declared or next(iter(scored_as.values())), None)
    request = {
        "model": source,
        "fingerprint": model_fingerprint(model),
        "declares": None if declared is None else declared.to_dict(),
        "prompts": own_prompts.texts,
        "max_length": max_length,
        "similarities": {name: similarity.to_dict() for name, similarity in scored_as.items()},
        "measures": list(measures),
    }
    return _Encoder(model, own_prompts, subject, scored_as, request)


def _part(
    encoder: _Encoder,
    material: Collection | ScoredPairs,
    measures: tuple[str, ...],
    parts: Parts | None,
    progress: Progress,
) -> Part:
    """The part of this encoder and data, from the folder where it is finished there."""
    if parts is None:
        return _measured(encoder, material, measures, {}, None)
    request = encoder.request | {"data": _fingerprint(material), "split": material.split}
    model = encoder.subject.model
    if kept := parts.find(model, material.name, request):
        progress.say(f"{material.name}: finished before, kept")
        return kept
    part = _measured(encoder, material, measures, request, parts.unfinished(model, material.name))
    return parts.finish(model, material.name, part)


def _measured(
    encoder: _Encoder,
    material: Collection | ScoredPairs,
    measures: tuple[str, ...],
    request: dict[str, Any],
    runs: Path | None,
) -> Part:
    """The outcome of one encoding pass; run files go to ``runs``."""
    if isinstance(material, ScoredPairs):
        rows = evaluate_pairs(embed_pairs(encoder.model, material), encoder.subject, encoder.scored_as)
        return Part(request, {"pairs": len(material), "split": material.split}, rows)
    embedded = embed(encoder.model, material, cache=cache_at_hand())
    evaluation = evaluate(embedded, encoder.subject, encoder.scored_as, measures)
    rows = [row for row in evaluation.results if row.scored_as in encoder.scored_as]
    if runs is not None:
        for name, similarity in encoder.scored_as.items():
            ranking = rescored(evaluation.table.rankings[name], embedded, similarity)
            write_trec(ranking, runs / f"{name}.trec", f"{name}-{material.name}")
    rows += _with_missing(encoder, embedded, evaluation, measures) if material.missing else []
    return Part(
        request,
        material.describe(),
        rows,
        dict(evaluation.table.values),
        evaluation.norms["cohens_d"],
    )


def _with_missing(
    encoder: _Encoder, embedded: EmbeddedCollection, evaluation: Evaluation, measures: tuple[str, ...]
) -> list[Result]:
    """Rows that count the judgements of documents that the corpus lacks, each beside the most that it could be."""
    collection = embedded.collection
    judged = all_judgements(collection.qrels, collection.missing)
    most = ceilings(collection.qrels, collection.missing, measures)
    rows = []
    for name in encoder.scored_as:
        found = per_query(evaluation.table.rankings[name].run(), judged, measures)
        for measure, values in found.items():
            for suffix, by_query in ((ALL_JUDGED, values), (CEILING, most[measure])):
                mean, named = fmean(by_query.values()), f"{measure}{suffix}"
                rows.append(encoder.subject.result(name, collection.name, collection.split, named, mean, len(by_query)))
    return rows


def _fingerprint(material: Collection | ScoredPairs) -> str:
    """A hash of all of the data that decides the outcome."""
    if isinstance(material, ScoredPairs):
        return digest([material.first, material.second, material.scores])
    return digest([material.fingerprint(), sorted(material.prompts.items()), sorted(material.missing.items())])


def _compare(parts: Iterable[Part], measure: str, split: str, seed: int) -> RunComparison | None:
    """Every similarity against the first, on the collections; None where there is one similarity, or no collection."""
    ranked = [part for part in parts if part.values]
    if not ranked or len(names := ranked[0].similarities) < 2:
        return None
    values = {part.dataset: {name: part.values[name][measure] for name in names} for part in ranked}
    notes = [f"{part.dataset}: {note}" for part in ranked for note in part.data["notes"]]
    return compare_values(values, names, scopes_of([*values]), measure=measure, split=split, notes=notes, seed=seed)


def _points(model: str, parts: Iterable[Part], measure: str) -> list[Point]:
    ranked = [part for part in parts if part.values and COSINE in part.similarities]
    means = {
        part.dataset: {name: fmean(part.values[name][measure].values()) for name in part.similarities}
        for part in ranked
    }
    return points_of(model, means, {part.dataset: part.cohens_d for part in ranked})


def _write(
    out: Path,
    parts: Parts,
    found: Mapping[str, list[Part]],
    in_force: Mapping[str, Mapping[str, Prompts]],
    results: list[Result],
) -> None:
    """The files of a finished evaluation; with several encoders a run file has the encoder's name before its own.

    ``in_force[dataset][model]`` are the prompts; two models may count other tokens for the same.
    """
    (out / "runs").mkdir(parents=True, exist_ok=True)
    values = []
    for source, of_model in found.items():
        for part in of_model:
            dataset, prefix = part.dataset, "" if len(found) == 1 else f"{slug(source)}."
            for name in part.runs:
                parts.gather(source, dataset, name, out / "runs" / f"{prefix}{name}-{dataset}.trec")
            own = _own(part)
            values += [
                QueryValue(source, PRETRAINED, None, dataset, measure, query, value)
                for measure, by_query in part.values.get(own, {}).items()
                for query, value in by_query.items()
            ]
    write_results(out / "results.csv", results)
    write_query_values(out / "per_query.parquet", values)
    fingerprints = {part.dataset: part.request["data"] for of in found.values() for part in of}
    described = describe_environment(fingerprints) | {
        "models": {
            source: {key: value for key, value in of[0].request.items() if key not in ("data", "split", "model")}
            for source, of in found.items()
        },
        "datasets": {
            part.dataset: part.data
            | {"models": {source: one.to_dict() for source, one in in_force[part.dataset].items()}}
            for of in found.values()
            for part in of
        },
    }
    write_atomically(out / "environment.json", json.dumps(described, indent=2, ensure_ascii=False) + "\n")


def _own(part: Part) -> str:
    """The name of the model's own similarity; of one that declares none, the first that was asked for."""
    declared = part.request["declares"]
    return Similarity.from_dict(declared).name if declared else next(iter(part.request["similarities"]))
