"""The comparison: one encoder, trained once a similarity and seed under matched conditions, and a verdict."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

from offsphere.config import CompareConfig
from offsphere.encoders import (
    check_lengths,
    declared_similarity,
    encode,
    open_encoder,
    randomise,
    save_encoder,
    set_dropout,
    strip_normalize,
)
from offsphere.evaluation.comparison import Comparison, compare_similarities
from offsphere.evaluation.embedding import embed
from offsphere.evaluation.evaluate import Evaluation, Subject, evaluate
from offsphere.evaluation.ranking import EmbeddedCollection, rank, write_trec
from offsphere.evaluation.results import PRETRAINED, write_query_values, write_results
from offsphere.losses import ALPHA, resolve_scale
from offsphere.modules import LearnedSimilarity, learned_similarity
from offsphere.packed import packed_input
from offsphere.progress import Progress, Silent
from offsphere.similarity import FIXED, LEARNABLE, Similarity, norms
from offsphere.training.batches import training_dataset
from offsphere.training.cached_inputs import CachedTokens, FrozenTrunk, cached_input, original_input
from offsphere.training.card import model_card
from offsphere.training.materials import Materials, load_materials
from offsphere.training.plan import Plan, make_plan
from offsphere.training.run_folder import Finished, RunFolder, write_atomically, write_variant
from offsphere.training.trainer import trainable_state
from offsphere.training.variant import Variant, train_variant

SAMPLE = 512
"""Pairs whose lengths set the automatic scale and show whether there are lengths at all."""


def compare(config: CompareConfig, progress: Progress | None = None) -> Comparison:
    """Train every similarity with every seed, evaluate all, and say which one to use; goes on with an unfinished run.

    The run folder then holds ``results.csv``, ``per_query.parquet``, ``norms.json``, ``log.jsonl``,
    ``comparison.json``, ``runs/``, one model a similarity under ``variants/``, and the recommended one in ``model/``.

    Args:
        config: The settings.
        progress: Told what happens.

    Raises:
        OffsphereError: If encoder, data, settings or folder do not allow it; found before any training where possible.
    """
    return _Run(config, progress or Silent()).finish()


class _Run:
    """One call of ``compare``: what is loaded once and used for every variant."""

    def __init__(self, config: CompareConfig, progress: Progress):
        self.config = config
        self.progress = progress
        self.folder = RunFolder(config.out)
        self.materials: Materials = load_materials(config)
        self.model: SentenceTransformer = open_encoder(
            config.model,
            max_length=config.max_length,
            prompts=config.prompts(),
            device=config.device,
        )
        self.declared = declared_similarity(self.model) or Similarity.parse("cosine")
        self.normalized = bool(strip_normalize(self.model))
        if learned_similarity(self.model) is not None:
            del self.model[-1]  # what another training learned is not what this one starts from
        self.random = config.init == "random"
        if config.dropout is not None:
            set_dropout(self.model, config.dropout)
        self.plan: Plan = make_plan(config, self.model, len(self.materials.pairs))
        similarities = [Similarity.parse(name) for name in config.similarities]
        # Learnable first: the others of its seed are then also scored with the gammas that it learned.
        similarities.sort(key=lambda similarity: not similarity.learned)
        self.variants = [Variant(one, seed) for seed in config.seeds for one in similarities]

    def finish(self) -> Comparison:
        """Do what is missing and write the outcome."""
        self.folder.begin(self.plan.resolve(self.config), self.materials.fingerprints())
        self._announce()
        missing = [variant for variant in self.variants if self.folder.find(variant.name) is None]
        if missing or self._lacks_reference():
            with cached_input(self.model, self.config.freeze_layers, self.folder.path), packed_input(self.model) as how:
                self.progress.say(f"computes       {how}")
                self._run_variants(missing)
        return self._conclude()

    def _announce(self) -> None:
        config, plan, materials = self.config, self.plan, self.materials
        say = self.progress.say
        frozen = "" if config.freeze_layers is None else f", the first {config.freeze_layers} layers frozen"
        say(f"encoder        {config.model} ({config.init}{frozen})")
        say(f"training       {len(materials.pairs)} pairs of {', '.join(config.train)}")
        say(
            f"               {plan.steps} steps of {plan.batch_size}, rate {plan.learning_rate:g}, scale {config.scale}"
        )
        say(f"similarities   {', '.join(config.similarities)}; seeds {', '.join(map(str, config.seeds))}")
        for domain, inside in (("in domain", True), ("out of domain", False)):
            for one in materials.evaluation:
                if (one.name in materials.in_domain) == inside:
                    say(f"{domain:<14} {one.name}: {len(one.queries)} queries, {len(one.documents)} documents")
        done = sum(self.folder.find(variant.name) is not None for variant in self.variants)
        state = f" ({done} of {len(self.variants)} variants are done already)" if done else ""
        say(f"run folder     {config.out}{state}")
        for note in materials.notes():
            say(f"note: {note}")
        if self.normalized:
            say(
                f"note: {config.model} ends with a Normalize module, which erases every length; it is taken off for "
                "all variants (cosine does not see the difference)"
            )

    def _run_variants(self, missing: list[Variant]) -> None:
        model = self.model
        if isinstance(model[0], CachedTokens | FrozenTrunk):
            model[0].fill(self.materials.texts(model.prompts), self.progress)
        if not self.random:
            lengths = self._lengths()
        if self._lacks_reference():
            with self.folder.unfinished(PRETRAINED) as folder:
                self._evaluate(Finished(PRETRAINED, self.declared, PRETRAINED), folder)
        start = {name: value.clone() for name, value in trainable_state(model).items()}
        dataset, known_positives = training_dataset(self.materials.pairs)
        for number, variant in enumerate(missing, 1):
            began = time.monotonic()
            model.load_state_dict(start, strict=False)
            if self.random:
                randomise(model, variant.seed)
                lengths = self._lengths()
            with self.folder.unfinished(variant.name) as folder:
                trained = train_variant(
                    model=model,
                    dataset=dataset,
                    known_positives=known_positives,
                    variant=variant,
                    scale=resolve_scale(self.config.scale, variant.similarity, *lengths),
                    plan=self.plan,
                    dev=self.materials.dev,
                    log=folder / "log.jsonl",
                    on_step=self.progress.start(f"{variant.name} ({number}/{len(missing)})", self.plan.steps),
                )
                finished = Finished(
                    variant.name, trained_as=variant.similarity.name, seed=variant.seed, **vars(trained)
                )
                evaluations = self._evaluate(finished, folder)
                self._save_model(finished, evaluations, folder / "model")
            if learned_similarity(model) is not None:
                del model[-1]
            self._keep_best_seed(finished)
            self.progress.say(self._summary(finished, evaluations, time.monotonic() - began))
            if finished.collapse is not None:
                self.progress.say(f"warning: {variant.name}: {finished.collapse}")

    def _lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of query and document embeddings where training starts, on a sample of the pairs; checked."""
        pairs = self.materials.pairs.sample(SAMPLE)
        size = self.plan.encode_batch_size
        queries = encode(self.model, pairs.queries, "query", batch_size=size)
        documents = encode(self.model, pairs.positives, "document", batch_size=size)
        for name in self.config.similarities:
            check_lengths(queries, documents, Similarity.parse(name))
        return norms(queries), norms(documents)

    def _lacks_reference(self) -> bool:
        """Whether the encoder before training is still to be evaluated; weights drawn at random are no reference."""
        return not self.random and self.folder.find(PRETRAINED) is None

    def _evaluate(self, finished: Finished, folder: Path) -> list[Evaluation]:
        """Rank every evaluation collection with the model as it is, and write what came out into the folder."""
        subject = Subject(
            self.config.model,
            self.materials.pairs.name if finished.seed is not None else "",
            finished.trained_as,
            finished.similarity,
            finished.seed,
        )
        scored_as = self._scored_as(finished)
        on_collection = self.progress.start(f"evaluate {finished.name}", len(self.materials.evaluation))
        evaluations = []
        for number, collection in enumerate(self.materials.evaluation, 1):
            embedded = embed(self.model, collection, self.plan.encode_batch_size)
            evaluations.append(evaluate(embedded, subject, scored_as))
            self._write_run(finished, embedded, folder)
            on_collection(number)
        write_results(folder / "results.csv", [row for one in evaluations for row in one.results])
        write_query_values(folder / "per_query.parquet", [row for one in evaluations for row in one.query_values])
        records = [{"similarity": finished.trained_as, "seed": finished.seed, **one.norms} for one in evaluations]
        write_atomically(folder / "norms.json", json.dumps(records))
        write_variant(folder, finished)
        return evaluations

    def _scored_as(self, finished: Finished) -> Mapping[str, Similarity]:
        """The four fixed similarities, those of the run, and the gammas that the same seed learned."""
        scored_as = {name: Similarity.parse(name) for name in FIXED}
        scored_as |= {v.similarity.name: v.similarity for v in self.variants if not v.similarity.learned}
        learned = self.folder.find(f"{LEARNABLE}-seed{finished.seed}")
        if learned is not None:
            scored_as[LEARNABLE] = learned.similarity
        return scored_as

    def _write_run(self, finished: Finished, embedded: EmbeddedCollection, folder: Path) -> None:
        wanted = {"none": [], "first": [self.config.seeds[0]], "all": self.config.seeds}[self.config.run_files]
        if finished.seed in wanted:
            (folder / "runs").mkdir(exist_ok=True)
            tag = f"{finished.name}-{embedded.collection.name}"
            write_trec(rank(embedded, finished.similarity), folder / "runs" / f"{tag}.trec", tag)

    def _save_model(self, finished: Finished, evaluations: list[Evaluation], folder: Path) -> None:
        carries_gammas = learned_similarity(self.model) is not None
        if carries_gammas and finished.similarity.name in FIXED:
            del self.model[-1]  # a trained scale has done its work; without it the model needs no offsphere
        elif not carries_gammas and finished.similarity.name not in FIXED:
            self.model.append(LearnedSimilarity(finished.similarity, finished.scale or ALPHA))
        results = [row for one in evaluations for row in one.results]
        with original_input(self.model):
            card = model_card(finished, results, self.config, self.plan)
            save_encoder(self.model, folder, finished.similarity, card)

    def _keep_best_seed(self, finished: Finished) -> None:
        """Of each similarity, only the model of the seed with the best validation stays."""
        same = [one for one in self.folder.finished() if one.trained_as == finished.trained_as]
        best = max(same, key=lambda one: one.validation or 0.0)
        for one in same:
            if one is not best:
                self.folder.remove_model(one.name)

    def _summary(self, finished: Finished, evaluations: list[Evaluation], seconds: float) -> str:
        parts = [f"{finished.name:<18}"]
        if finished.validation is not None:
            parts.append(f"validation {finished.validation:.4f}")
        for domain, inside in (("in domain", True), ("out of domain", False)):
            values = [
                row.value
                for one in evaluations
                for row in one.results
                if row.scored_as == finished.similarity.name and row.measure == "nDCG@10"
                if (row.dataset in self.materials.in_domain) == inside
            ]
            if values:
                parts.append(f"{domain} {np.mean(values):.4f}")
        if finished.similarity.learned:
            parts.append("gammas {:.2f}, {:.2f}".format(*finished.similarity.gammas))
        return "  ".join([*parts, f"{seconds:.0f} s"])

    def _conclude(self) -> Comparison:
        order = sorted(self.variants, key=lambda v: (self.config.similarities.index(v.similarity.name), v.seed))
        reference = [] if self.random else [PRETRAINED]
        _, values = self.folder.gather([*reference, *(variant.name for variant in order)])
        comparison = compare_similarities(self.config.model, values, self.materials.in_domain)
        write_atomically(self.folder.path / "comparison.json", json.dumps(comparison.to_dict(), indent=2) + "\n")
        finished = [one for one in self.folder.finished() if one.trained_as == comparison.verdict.similarity]
        self.folder.recommend(max(finished, key=lambda one: one.validation or 0.0).name)
        return comparison
