"""The best gamma_d of a model that is already trained: no training, one set of embeddings, an honest gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offsphere.data import Collection
from offsphere.diagnosis.effect_size import FEWEST_QUERIES
from offsphere.diagnosis.gamma_curve import gamma_curve
from offsphere.diagnosis.material import load_material
from offsphere.diagnosis.subject import Encoder, embed_material, open_bare
from offsphere.encoders import save_encoder
from offsphere.errors import ConfigError, DataError, UsageError
from offsphere.evaluation.significance import bootstrap_difference, paired_randomisation
from offsphere.progress import Progress, Silent
from offsphere.similarity import Similarity

GAMMAS = tuple(np.linspace(-0.5, 1.5, 41).round(10).tolist())
SIMPLE = (1.0, 0.0)
NOISE = 0.05
INNER_RESAMPLES = 2_000
MEASURE = "nDCG@10"


@dataclass(frozen=True)
class Tuning:
    """The choice of gamma_d; values are nDCG@10 as fractions from 0 to 1.

    Attributes:
        gamma_d: The choice: 1, 0 or the model's own where these are within noise of the best, else the best.
        own_gamma_d: The model's own.
        best_gamma_d: Where the curve has its top on all queries, whether that means anything or not.
        value: Of the choice, on the queries that it was chosen by.
        own_value: Of the model's own gamma_d, on the same queries.
        gain: What choosing in this way gains on queries that took no part in the choice, by cross-validation.
        low: Lower end of its 95 % interval over queries.
        high: Its upper end.
        p: Two-sided p-value of no gain, by paired randomisation.
        fold_gammas: What was chosen without each part of the queries.
        curve: (gamma_d, mean nDCG@10) over the grid.
        n_queries: Queries.
        n_documents: Documents.
        sentence: The result in words.
    """

    gamma_d: float
    own_gamma_d: float
    best_gamma_d: float
    value: float
    own_value: float
    gain: float
    low: float
    high: float
    p: float
    fold_gammas: list[float]
    curve: list[tuple[float, float]]
    n_queries: int
    n_documents: int
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """The tuning as plain dicts, lists and numbers, for JSON."""
        return asdict(self)


def choose_gamma(
    values: np.ndarray, gammas: Sequence[float], own_gamma_d: float, n_documents: int, *, folds: int = 5, seed: int = 0
) -> Tuning:
    """The gamma_d to use, and what that gains, from the values of every query under every gamma.

    The best gamma of some queries flatters itself on them, so it is judged on others twice over. Inside, folds decide
    whether it beats 1 or 0 beyond noise (p < 0.05); otherwise the simple one stays, the model's own first. Around
    that, folds measure what this whole procedure gains on queries that it has not seen.

    Args:
        values: (Q, G) a measure of each query under each gamma.
        gammas: The G exponents; 0, 1 and the model's own must be among them.
        own_gamma_d: The model's own.
        n_documents: For the record.
        folds: Number of parts, inside and around.
        seed: Of the partition and the resampling.

    Raises:
        ConfigError: If there are fewer than two folds or fewer queries than folds.
    """
    if not 2 <= folds <= len(values):
        raise ConfigError(f"folds must be between 2 and the number of queries, {len(values)}; found {folds}")
    own = values[:, gammas.index(own_gamma_d)]
    part = np.random.default_rng(seed).permutation(len(values)) % folds
    chosen = [_choose(values[part != fold], gammas, own_gamma_d, folds, seed) for fold in range(folds)]
    held_out = values[np.arange(len(values)), np.take(chosen, part)]
    choice, best = _choose(values, gammas, own_gamma_d, folds, seed), int(values.mean(0).argmax())
    gain = float((held_out - own).mean())
    low, high = bootstrap_difference([held_out[None]], [own[None]], seed=seed)
    p = float(paired_randomisation(held_out, own, seed=seed))
    interval = f"{100 * gain:+.1f} {MEASURE} [{100 * low:.1f}, {100 * high:.1f}], p = {p:.3f}"
    sentence = (
        f"keep gamma_d {own_gamma_d:g}: no other is better beyond noise (cross-validated {interval})"
        if gammas[choice] == own_gamma_d
        else f"gamma_d {gammas[choice]:g} in place of {own_gamma_d:g}: {interval} on queries held out of the choice"
    )
    return Tuning(
        gamma_d=gammas[choice],
        own_gamma_d=own_gamma_d,
        best_gamma_d=gammas[best],
        value=float(values[:, choice].mean()),
        own_value=float(own.mean()),
        gain=gain,
        low=float(low),
        high=float(high),
        p=p,
        fold_gammas=[gammas[index] for index in chosen],
        curve=list(zip(gammas, values.mean(0).tolist(), strict=True)),
        n_queries=len(values),
        n_documents=n_documents,
        sentence=sentence,
    )


def tune(
    model_source: str,
    data: str,
    *,
    split: str = "dev",
    similarity: str | None = None,
    gammas: Sequence[float] = GAMMAS,
    folds: int = 5,
    max_queries: int | None = None,
    max_documents: int | None = None,
    max_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
    device: str | None = None,
    strict: bool = False,
    seed: int = 0,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """The gamma_d that ranks a split best, whether that is more than noise, and the model with it if wanted.

    Args:
        model_source: The encoder (see ``open_encoder``).
        data: A collection.
        split: Whose queries decide; not the ones that results are reported on.
        similarity: What the model was trained with, where it does not say so itself.
        gammas: The exponents to try; 0, 1 and the model's own are added.
        folds: Parts of the cross-validation.
        max_queries: A random sample of the queries.
        max_documents: Their relevant documents and a random sample of others; fewer documents flatter every gamma.
        max_length: Tokens kept of each text.
        prompts: By side, in place of the model's own and of the collection's.
        device: Where to encode.
        strict: Refuse judgements of texts that do not exist.
        seed: Of samples, folds and resampling.
        out: Folder to save the model with the chosen gamma_d to; the model's own folder changes it in place.
        progress: Told what happens.

    Raises:
        ConfigError: If a gamma is not finite, or the similarity is unknown.
        DataError: If the data is malformed, or has fewer than 20 queries with relevant and other documents.
        EncoderError: If the encoder cannot be opened, or an embedding is NaN or infinite.
        UsageError: If the model does not say what it was trained with and ``similarity`` is not given.
    """
    progress = progress or Silent()
    given = None if similarity is None else Similarity.parse(similarity)
    if not np.isfinite(gammas).all():
        raise ConfigError(f"gammas must be finite numbers, found {list(gammas)!r}")
    whole = load_material(data, split, prompts=prompts or (), strict=strict)
    material = whole.sample(max_queries, max_documents, seed)
    _check_enough(material.collection)
    encoder = open_bare(model_source, max_length, prompts, device)
    own = given or encoder.declared
    if own is None:
        raise UsageError(
            f"{model_source} does not say which similarity it was trained with, so there is nothing to compare with; "
            "give it, such as --similarity cosine or --similarity dot"
        )
    embedded = embed_material(encoder, material, progress)
    grid = sorted({*map(float, gammas), *SIMPLE, own.gammas[1]})
    done = progress.start(f"{MEASURE} under {len(grid)} exponents", len(embedded.queries))
    values = gamma_curve(embedded, np.array(grid), on_queries=done)
    tuning = choose_gamma(values, grid, own.gammas[1], len(embedded.documents), folds=folds, seed=seed)
    if out is not None:
        write_tuned(encoder, own, tuning, out, f"{material.collection.name} ({split})")
        progress.say(f"wrote {out} with gamma_d {tuning.gamma_d:g}")
    return tuning


def write_tuned(encoder: Encoder, own: Similarity, tuning: Tuning, folder: Path, data: str) -> None:
    """Save the model so that it ranks with the chosen gamma_d: as one of the fixed similarities where it is 0 or 1.

    With another exponent the model carries it as a module, and ``open_encoder`` loads it.

    Args:
        encoder: Its model is changed.
        own: What it was trained with; its gamma_q stays.
        tuning: The choice.
        folder: Replaced if it exists; a card in it, or beside the model, is kept and added to.
        data: What the choice was made on.
    """
    from offsphere.modules import LearnedSimilarity, learned_similarity

    similarity = Similarity(own.gammas[0] if tuning.gamma_d not in SIMPLE else _nearest(own.gammas[0]), tuning.gamma_d)
    carried = learned_similarity(encoder.model)
    if carried is not None:
        del encoder.model[list(encoder.model).index(carried)]
    if tuning.gamma_d not in SIMPLE:
        scale = 20.0 if carried is None else float(carried.scale)
        encoder.model.append(LearnedSimilarity(similarity, scale).to(encoder.model.device))
    save_encoder(encoder.model, folder, similarity, _card(encoder.source, similarity, tuning, data))


def _check_enough(collection: Collection) -> None:
    """Refuse a collection with too few queries that have something to choose between."""
    n_documents = len(collection.documents)
    n_open = sum(sum(grade > 0 for grade in grades.values()) < n_documents for grades in collection.qrels.values())
    if n_open < FEWEST_QUERIES:
        raise DataError(
            f"not enough data: {collection.name} ({collection.split}) has {n_open} queries with both relevant and "
            f"other documents to choose between; tuning needs at least {FEWEST_QUERIES}",
            collection.path,
        )


def _choose(values: np.ndarray, gammas: Sequence[float], own: float, folds: int, seed: int) -> int:
    """Index of the gamma to use: a simple one if the best does not beat it on queries that did not choose the best."""
    part = np.random.default_rng(seed).permutation(len(values)) % folds
    best = [int(values[part != fold].mean(0).argmax()) for fold in range(folds)]
    held_out, means = values[np.arange(len(values)), np.take(best, part)], values.mean(0)
    simple = sorted(map(gammas.index, SIMPLE), key=lambda index: (gammas[index] != own, -means[index]))
    for index in dict.fromkeys((*simple, gammas.index(own))):
        p = paired_randomisation(held_out, values[:, index], resamples=INNER_RESAMPLES, seed=seed)
        if held_out.mean() <= means[index] or p >= NOISE:
            return index
    return int(means.argmax())


def _nearest(gamma: float) -> float:
    """0 or 1: the ranking does not depend on gamma_q, and with both exponents whole the model needs no offsphere."""
    return float(gamma >= 0.5)


def _card(source: str, similarity: Similarity, tuning: Tuning, data: str) -> str:
    """The model's own card, if it has one, and what was changed."""
    readme = Path(source) / "README.md"
    before = readme.read_text(encoding="utf-8").rstrip() if readme.is_file() else f"# {source}"
    opens = "SentenceTransformer" if tuning.gamma_d in SIMPLE else "offsphere.open_encoder"
    gamma_q, gamma_d = similarity.gammas
    return f"""{before}

## The length of documents, tuned

s(q, d) = (q . d) / (|q|^{gamma_q:g} |d|^{gamma_d:g}), where the model had |d|^{tuning.own_gamma_d:g}.

Result: {tuning.sentence}.

Chosen on {tuning.n_queries:,} queries and {tuning.n_documents:,} documents of {data} by `offsphere tune`, which changes
no weight. Open it with `{opens}`, and compare what `encode_query` and `encode_document` give with the similarity that
the model declares.
"""
