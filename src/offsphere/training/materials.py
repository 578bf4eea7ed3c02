"""What a comparison works on: training pairs, dev splits to validate on, and collections to evaluate on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from offsphere.config import RunConfig
from offsphere.data import Collection, TrainingPairs, available_splits, load_collection, load_pairs
from offsphere.data.beir import is_collection
from offsphere.errors import ConfigError

DEV = "dev"
HELD_OUT = 0.1


@dataclass(frozen=True)
class Materials:
    """All data of a run, loaded and sampled.

    Attributes:
        pairs: Of every training source, one after the other.
        dev: A small dev collection for each training source.
        evaluation: What to evaluate on.
        in_domain: Names of the evaluation collections whose train split is trained on.
    """

    pairs: TrainingPairs
    dev: list[Collection]
    evaluation: list[Collection]
    in_domain: list[str]

    def fingerprints(self) -> dict[str, str]:
        """A SHA-256 for the pairs, each dev collection and each evaluation collection."""
        named = {f"pairs {self.pairs.name}": self.pairs.fingerprint()}
        return named | {name: collection.fingerprint() for name, collection in self.collections().items()}

    def collections(self) -> dict[str, Collection]:
        """Each dev and each evaluation collection, by the name that environment.json has for it."""
        named = {f"dev {collection.name}": collection for collection in self.dev}
        return named | {f"evaluation {collection.name}": collection for collection in self.evaluation}

    def notes(self) -> list[str]:
        """What a reader must know about the data, a sentence each."""
        about = [(self.pairs.name, self.pairs.notes)]
        about += [(f"{one.name} ({one.split})", one.notes) for one in (*self.dev, *self.evaluation)]
        notes = [f"{name}: {note}" for name, notes in about for note in notes]
        return notes + [
            f"{one.name} ({one.split}): {rules}"
            for one in (*self.dev, *self.evaluation)
            if (rules := one.never_ranked())
        ]

    def texts(self, prompts: Mapping[str, str]) -> Iterator[str]:
        """Every text of the run behind its prompt, some more than once.

        Args:
            prompts: The model's prompt for "query" and "document"; a collection's own prompts come before it.
        """
        query, document = prompts.get("query", ""), prompts.get("document", "")
        yield from (query + text for text in self.pairs.queries)
        yield from (document + text for column in (self.pairs.positives, *self.pairs.negatives) for text in column)
        for one in (*self.dev, *self.evaluation):
            yield from (one.prompts.get("query", query) + text for text in one.queries.values())
            yield from (one.prompts.get("document", document) + text for text in one.documents.values())


def load_materials(config: RunConfig) -> Materials:
    """Load what the settings name, sample it, and find a dev collection for each training source.

    A training collection without a dev split gives up a tenth of its queries for validation.

    Raises:
        ConfigError: If two evaluation collections have the same name.
        DataError: If something is malformed, with file and line.
    """
    sources: list[TrainingPairs] = []
    dev: list[Collection] = []
    for source in config.train:
        pairs = load_pairs(source)
        if is_collection(Path(source).expanduser()) and DEV in available_splits(source):
            held_out = load_collection(source, DEV, strict=config.strict)
        else:
            pairs, rest = pairs.split_off(HELD_OUT)
            held_out = rest.as_collection(DEV)
        sources.append(pairs)
        dev.append(held_out.sample(config.validation_queries, config.validation_documents))
    pairs = TrainingPairs.concatenate(sources)
    if config.max_pairs is not None:
        pairs = pairs.sample(config.max_pairs)
    evaluation = [load_collection(source, config.split, strict=config.strict) for source in config.eval]
    names = [collection.name for collection in evaluation]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"two evaluation collections are named {', '.join(repeated)}; give each a name of its own "
            "with 'name:' in its collection.yaml"
        )
    trained_on = {Path(source).expanduser().resolve() for source in config.train}
    sampled = [one.sample(config.max_queries, config.max_documents) for one in evaluation]
    given = config.prompts()
    return Materials(
        pairs=pairs,
        dev=[one.without_prompts(given) for one in dev],
        evaluation=[one.without_prompts(given) for one in sampled],
        in_domain=[one.name for one in evaluation if one.path is not None and one.path.resolve() in trained_on],
    )
