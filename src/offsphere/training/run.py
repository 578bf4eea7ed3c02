"""A run: one encoder, trained once a similarity and seed under matched conditions; what compare and train share."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.util.distributed import distributed_evaluation

from offsphere import processes
from offsphere.atomic import write_atomically
from offsphere.cached_inputs import CachedTokens, FrozenTrunk, cached_input, original_input
from offsphere.config import RunConfig
from offsphere.data import Collection
from offsphere.encoders import (
    add_lora,
    check_lengths,
    check_precision,
    checkpoint_gradients,
    computing_in,
    declared_similarity,
    encode,
    open_encoder,
    randomise,
    save_encoder,
    set_dropout,
    strip_normalize,
)
from offsphere.encoding.prompts import Prompts, prompts_in_force
from offsphere.evaluation.embedding import embed
from offsphere.evaluation.evaluate import Evaluation, Subject, evaluate
from offsphere.evaluation.ranking import EmbeddedCollection, rank, write_trec
from offsphere.evaluation.results import PRETRAINED, write_query_values, write_results
from offsphere.losses import ALPHA, resolve_scale, warn_of_saturation
from offsphere.modules import LearnedSimilarity, learned_similarity
from offsphere.packed import packed_input
from offsphere.progress import Progress, Silent
from offsphere.similarity import FIXED, LEARNABLE, Similarity, norms
from offsphere.training.announcement import announcement
from offsphere.training.batches import training_dataset
from offsphere.training.card import model_card
from offsphere.training.grid import Tried, best_of, read_grid, warn_of_edges, write_grid
from offsphere.training.materials import Materials, load_materials
from offsphere.training.memory_plan import plan_memory
from offsphere.training.plan import Plan, make_plan
from offsphere.training.run_folder import Finished, RunFolder, write_variant
from offsphere.training.trainer import trainable_state
from offsphere.training.variant import Trained, Variant, train_variant

SAMPLE = 512
"""Pairs whose lengths set the automatic scale and show whether there are lengths at all."""


class Run:
    """What is loaded once and used for every variant.

    Args:
        config: The settings.
        progress: Told what happens, by the first process.

    Raises:
        OffsphereError: If encoder, data or settings do not allow it; found before any training where possible.
    """

    def __init__(self, config: RunConfig, progress: Progress | None = None):
        device = processes.join(config.device)
        self.config = config
        self.progress = progress if progress is not None and processes.is_first() else Silent()
        self.folder = RunFolder(config.out)
        self.materials: Materials = load_materials(config)
        self.model: SentenceTransformer = open_encoder(
            config.model,
            max_length=config.max_length,
            prompts=config.prompts(),
            pooling=config.pooling,
            device=device,
        )
        self.prompts = prompts_in_force(self.model)
        check_precision(self.model.device.type, config.precision)
        self.declared = declared_similarity(self.model) or Similarity.parse("cosine")
        self.normalized = bool(strip_normalize(self.model))
        if learned_similarity(self.model) is not None:
            del self.model[-1]  # what another training learned is not what this one starts from
        self.random = config.init == "random"
        if config.dropout is not None:
            set_dropout(self.model, config.dropout)
        if config.lora is not None:
            add_lora(self.model, config.lora)
        if config.gradient_checkpointing:
            checkpoint_gradients(self.model)
        self.plan: Plan = make_plan(config, self.model, len(self.materials.pairs), processes.count())
        similarities = [Similarity.parse(name) for name in config.trained]
        # Learnable first: the others of its seed are then also scored with the gammas that it learned.
        similarities.sort(key=lambda similarity: not similarity.learned)
        self.variants = [Variant(one, seed) for seed in config.seeds for one in similarities]
        self.warned: set[str] = set()

    def finish(self) -> None:
        """Do what is missing: after it the folder has every variant."""
        settings, fingerprints = self.plan.resolve(self.config), self.materials.fingerprints()
        processes.first(lambda: self.folder.begin(settings, fingerprints, self._datasets()))
        missing, lacks_reference = processes.first(self._missing)
        for line in announcement(self, done=len(self.variants) - len(missing)):
            self.progress.say(line)
        if missing or lacks_reference:
            with (
                cached_input(self.model, self.config.freeze_layers, self.folder.path),
                computing_in(self.model, self.config.precision),
                self._packed() as how,
            ):
                self.progress.say(f"computes       {how}")
                self._run_variants(missing, lacks_reference)

    def _packed(self) -> AbstractContextManager[object]:
        """Packed tokens where that is exact, which it is in float32 alone; gives how the encoder computes, in words."""
        if self.config.precision == "float32":
            return packed_input(self.model, trained=True)
        return nullcontext(f"ordinary forward pass, in {self.config.precision} under autocast")

    @property
    def order(self) -> list[str]:
        """The names of the variants in the order in which their rows stand: the untrained encoder, then as asked."""
        names = self.config.trained
        order = sorted(self.variants, key=lambda variant: (names.index(variant.similarity.name), variant.seed))
        return [*([PRETRAINED] if self._has_reference() else []), *(variant.name for variant in order)]

    def _missing(self) -> tuple[list[Variant], bool]:
        missing = [variant for variant in self.variants if self.folder.find(variant.name) is None]
        return missing, self._has_reference() and self.folder.find(PRETRAINED) is None

    def _datasets(self) -> dict[str, Any]:
        """What environment.json says of the collections: size, exclusions, and the prompts in force."""
        return {
            name: one.describe() | {"models": {self.config.model: self.prompts_on(one).to_dict()}}
            for name, one in self.materials.collections().items()
        }

    def prompts_on(self, collection: Collection) -> Prompts:
        """Those in force where a collection is evaluated: its own, or the model's."""
        return prompts_in_force(self.model, collection.prompts) if collection.prompts else self.prompts

    def _run_variants(self, missing: list[Variant], lacks_reference: bool) -> None:
        model = self.model
        if isinstance(model[0], CachedTokens | FrozenTrunk):
            model[0].fill(self.materials.texts(model.prompts), self.progress)
        if not self.random:
            self.lengths = processes.first(self._lengths)
        if lacks_reference:
            with self.folder.unfinished(PRETRAINED) as folder:
                self._evaluate(Finished(PRETRAINED, self.declared, PRETRAINED), folder)
        self.start = {name: value.clone() for name, value in trainable_state(model).items()}
        self.dataset, self.known_positives = training_dataset(self.materials.pairs)
        if missing:
            self._plan_memory()
            self._settle_grids()
        for number, variant in enumerate(missing, 1):
            began = time.monotonic()
            with self.folder.unfinished(variant.name) as folder:
                trained = self._train(variant, folder, f"{variant.name} ({number}/{len(missing)})")
                finished = Finished(
                    variant.name, trained_as=variant.similarity.name, seed=variant.seed, **vars(trained)
                )
                evaluations = self._evaluate(finished, folder)
                if processes.is_first():
                    self._save_model(finished, evaluations, folder / "model")
            self._take_off_learned()
            processes.first(lambda finished=finished: self._keep_best_seed(finished))  # type: ignore[misc]
            self.progress.say(self._summary(finished, evaluations, time.monotonic() - began))
            if finished.collapse is not None:
                self.progress.say(f"warning: {variant.name}: {finished.collapse}")

    def _plan_memory(self) -> None:
        """Decide how much of a batch goes through the encoder together, in all processes alike."""
        plan, pairs, asked = self.plan, self.materials.pairs, self.config.tokens_per_batch
        memory = processes.first(lambda: plan_memory(self.model, pairs, plan.batch_size, asked, plan.processes))
        self.plan = replace(plan, tokens_per_batch=memory.tokens_per_batch, tokens_kept=memory.tokens_kept)
        self.progress.say(f"memory         {memory}")
        if memory.warning:
            self.progress.say(f"warning: {memory.warning}")

    def _train(self, variant: Variant, folder: Path, what: str) -> Trained:
        """Train from the start of the variant's seed, or from where an interrupted training left the folder."""
        self.model.load_state_dict(self.start, strict=False)
        if self.random:
            randomise(self.model, variant.seed)
            self.lengths = processes.first(self._lengths)
        scale = resolve_scale(self.config.scale, variant.similarity, *self.lengths, self.plan.alpha)
        self._warn_of_scale(scale, variant.similarity)
        return train_variant(
            model=self.model,
            dataset=self.dataset,
            known_positives=self.known_positives,
            variant=variant,
            scale=scale,
            plan=self.plan,
            dev=self.materials.dev,
            log=folder / "log.jsonl",
            on_step=self.progress.start(what, self.plan.steps),
            say=self.progress.say,
        )

    def _warn_of_scale(self, scale: float, similarity: Similarity) -> None:
        """Once a similarity, whatever the number of seeds and rates."""
        warning = warn_of_saturation(scale, similarity, *self.lengths)
        if warning and similarity.name not in self.warned:
            self.warned.add(similarity.name)
            self.progress.say(f"warning: {similarity.name}: {warning}")

    def _take_off_learned(self) -> None:
        if learned_similarity(self.model) is not None:
            del self.model[-1]

    def _settle_grids(self) -> None:
        """Find what all variants share on the cosine one: the learning rate, alpha or both, where a grid is given."""
        grids = self.config.grids
        if not grids:
            return
        table = self.folder.path / "grid.csv"
        tried = processes.first(lambda: read_grid(table))
        done = {(one.learning_rate, one.alpha) for one in tried}
        rates, alphas = (grids.get(name, [getattr(self.plan, name)]) for name in ("learning_rate", "alpha"))
        for rate, alpha in itertools.product(rates, alphas):
            self.plan = replace(self.plan, learning_rate=rate, alpha=alpha)
            if (rate, alpha) in done:
                continue
            variant = Variant(Similarity.parse("cosine"), self.config.seeds[0])
            with self.folder.unfinished(f"{rate:g}-{alpha:g}", self.folder.path / "grid") as folder:
                trained = self._train(variant, folder, self._of_grids())
            self._take_off_learned()
            tried.append(Tried(rate, alpha, trained.validation or 0.0, trained.best_step, trained.converged_step))
            processes.first(lambda: write_grid(table, tried))
            self.progress.say(f"{self._of_grids():<34} validation {trained.validation or 0.0:.4f}")
        best = best_of(tried)
        self.plan = replace(self.plan, learning_rate=best.learning_rate, alpha=best.alpha)
        processes.first(lambda: self.folder.settle({name: getattr(best, name) for name in grids}))
        self.progress.say(f"{self._of_grids()}, for every variant and seed")
        for warning in warn_of_edges(tried):
            self.progress.say(f"warning: {warning}")

    def _of_grids(self) -> str:
        """What the plan has of the settings that grids find, in words."""
        return ", ".join(f"{name.replace('_', ' ')} {getattr(self.plan, name):g}" for name in self.config.grids)

    def _lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of query and document embeddings where training starts, on a sample of the pairs; checked.

        Not with random weights: those of a last norm layer all start at 1, and lengths come apart in training.
        """
        pairs = self.materials.pairs.sample(SAMPLE)
        size = self.plan.encode_batch_size
        queries = encode(self.model, pairs.queries, "query", batch_size=size)
        documents = encode(self.model, pairs.positives, "document", batch_size=size)
        for name in () if self.random else self.config.trained:
            check_lengths(queries, documents, Similarity.parse(name))
        return norms(queries), norms(documents)

    def _has_reference(self) -> bool:
        """Whether the encoder before training is evaluated too; weights drawn at random are no reference."""
        return not self.random and bool(self.materials.evaluation)

    def _evaluate(self, finished: Finished, folder: Path) -> list[Evaluation]:
        """Rank every evaluation collection with the model as it is, and write what came out into the folder.

        Several processes share the encoding; the first one ranks and has the outcome.
        """
        evaluations: list[Evaluation] = []
        with distributed_evaluation(self.model) as runs:
            if not runs:
                return evaluations
            subject = Subject(
                self.config.model,
                self.materials.pairs.name if finished.seed is not None else "",
                finished.trained_as,
                finished.similarity,
                finished.seed,
            )
            scored_as = self._scored_as(finished)
            on_collection = self.progress.start(f"evaluate {finished.name}", len(self.materials.evaluation))
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
