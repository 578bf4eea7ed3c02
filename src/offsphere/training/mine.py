"""Hard negatives for training pairs: what the model itself ranks high and nobody calls relevant.

Candidates come from an exact ranking under the model's own similarity, of raw embeddings. A dot-product model mined by
cosine would be given the negatives of another model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offsphere.data.pair_files import Write, check_form, pair_file, temporary_name
from offsphere.diagnosis.subject import Encoder, open_bare
from offsphere.encoders import Side, encode, model_fingerprint
from offsphere.errors import ConfigError, DataError, UsageError
from offsphere.evaluation.evaluate import OWN, asked_similarity
from offsphere.progress import Progress, Silent
from offsphere.search.exact import ExactSearch
from offsphere.similarity import Similarity
from offsphere.training.hard_negatives import Rule
from offsphere.training.mining_sources import (
    REASONS,
    Corpus,
    Forbidden,
    Ids,
    Source,
    known_texts,
    load_corpus,
    load_source,
)

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

DUPLICATE = "text of a better candidate"
RULE = Rule()
CANDIDATES_AT_ONCE = 2**18
MOST_PAIRS_AT_ONCE = 1024
BATCHES = 16
"""Batches encoded between two signs of progress."""


@dataclass
class Tally:
    """What happened to the pairs.

    Attributes:
        pairs: Read.
        kept: Of these, written.
        short: With fewer negatives than asked for, but one at least.
        without: Without any, and so never written.
        negatives: Written.
        ranks: The sum of their ranks.
        skipped: Documents passed over, by reason, each once for every pair and under the first reason that holds.
    """

    pairs: int = 0
    kept: int = 0
    short: int = 0
    without: int = 0
    negatives: int = 0
    ranks: int = 0
    skipped: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys((*REASONS, DUPLICATE), 0)))


@dataclass(frozen=True)
class Mined:
    """What was mined, and how.

    Attributes:
        out: The file of pairs.
        summary: The JSON file beside it that says all this.
        model: As the user named it.
        fingerprint: Of the model, see ``encoders.model_fingerprint``.
        similarity: That ranked the documents.
        max_length: Tokens kept of each text, where the user gave a limit.
        split: Of the sources that have any.
        rule: What a negative had to be.
        sources: Each with its name, fingerprint, pairs and the prompts in force.
        corpora: What was mined from.
        tally: What happened to the pairs.
    """

    out: Path
    summary: Path
    model: str
    fingerprint: str
    similarity: Similarity
    max_length: int | None
    split: str
    rule: Rule
    sources: list[dict[str, Any]]
    corpora: list[dict[str, Any]]
    tally: Tally

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON. ``dropped`` counts the pairs that are not in the file."""
        tally = self.tally
        return {
            "out": str(self.out),
            "model": self.model,
            "fingerprint": self.fingerprint,
            "similarity": {"name": self.similarity.name, **self.similarity.to_dict()},
            "max_length": self.max_length,
            "split": self.split,
            "settings": asdict(self.rule),
            "sources": self.sources,
            "corpora": self.corpora,
            "pairs": tally.pairs,
            "kept": tally.kept,
            "dropped": tally.pairs - tally.kept,
            "short": tally.short,
            "without": tally.without,
            "negatives": tally.negatives,
            "mean_rank": tally.ranks / tally.negatives,
            "skipped": dict(tally.skipped),
        }


def mine(
    model: str,
    train: Sequence[str],
    out: Path,
    rule: Rule = RULE,
    *,
    corpus: str | None = None,
    similarity: str | None = None,
    split: str = "train",
    prompts: Mapping[str, str] | None = None,
    max_length: int | None = None,
    batch_size: int = 64,
    pairs_at_once: int | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> Mined:
    """Write training pairs with hard negatives, in the order of the sources, and a summary beside them.

    Columns are query, positive and negative_1 to negative_n, best-ranked first. With ``rule.keep_short`` a pair has a
    row for each negative instead, with the columns query, positive and negative: such rows need not be equally many.

    For a seed the file is the same for every ``pairs_at_once`` and every order of the corpus, and for every batch size
    but for the rounding of the encoder.

    Args:
        model: The encoder (see ``open_encoder``); a Normalize module is taken off, since the similarity knows better.
        train: Collections, files or datasets of pairs (see ``load_pairs``); negatives that they have are left out.
        out: A .jsonl or .parquet file; the summary is ``NAME.mining.json``.
        rule: What a negative must be.
        corpus: What to mine from, a collection folder or a file of documents, whose ids mean the documents that the
            sources name. Otherwise the corpus of each collection, and of other pairs all their positives.
        similarity: Instead of the one that the model declares; needed where it declares none.
        split: Of a collection or dataset.
        prompts: By side, in place of the model's and the collections' own.
        max_length: Tokens kept of each text.
        batch_size: Texts in one forward pass.
        pairs_at_once: Pairs ranked at a time; changes memory and speed only.
        device: Where to encode.
        progress: Told what happens.

    Raises:
        ConfigError: If the file name or the similarity is unknown.
        UsageError: If the model declares no similarity and none is given, or the output is one of the inputs.
        DataError: If a source is malformed, or no pair has enough negatives left.
        EncoderError: If the model cannot be opened, or an embedding is NaN or infinite.
    """
    progress, given = progress or Silent(), prompts or {}
    _check_output(out, [*train, *([corpus] if corpus else [])])
    sources = [load_source(one, split, given) for one in train]
    shared = load_corpus(corpus, given) if corpus else None
    encoder = open_bare(model, max_length, given, device)
    asked = asked_similarity(similarity or OWN, encoder.declared, model)
    for line in _plan(encoder, asked, sources, rule):
        progress.say(line)
    tally, corpora = Tally(), []
    known = known_texts(sources)
    out.parent.mkdir(parents=True, exist_ok=True)
    summary = out.with_name(f"{out.name.removesuffix(out.suffix)}.mining.json")
    with pair_file(out, _columns(rule)) as write:
        for ground, here in _grounds(shared, sources):
            corpora.append({**ground.to_dict(), "prompt": _prompt(encoder.model, "document", ground.prompt)})
            mining = _Mining(encoder.model, asked, rule, ground, here, batch_size, progress)
            for source in here:
                mining.run(source, known, write, tally, pairs_at_once)
        if not tally.kept:
            raise DataError(_nothing(rule, tally), out)
        mined = Mined(
            out=out,
            summary=summary,
            model=model,
            fingerprint=model_fingerprint(encoder.model),
            similarity=asked,
            max_length=max_length,
            split=split,
            rule=rule,
            sources=[_described(encoder.model, source) for source in sources],
            corpora=corpora,
            tally=tally,
        )
        content = json.dumps(mined.to_dict(), indent=2, ensure_ascii=False) + "\n"
        # A summary of other pairs never lies beside these, whatever ends the process between the two.
        summary.unlink(missing_ok=True)
    temporary = temporary_name(summary)
    temporary.write_text(content, encoding="utf-8")
    temporary.replace(summary)
    return mined


class _Mining:
    """The embeddings of one corpus, and of all positives that are mined from it."""

    def __init__(
        self,
        model: SentenceTransformer,
        similarity: Similarity,
        rule: Rule,
        corpus: Corpus,
        sources: Sequence[Source],
        batch_size: int,
        progress: Progress,
    ):
        self.model, self.similarity, self.rule = model, similarity, rule
        self.corpus, self.sources = corpus, sources
        self.batch_size, self.progress = batch_size, progress
        self.rows = {text: row for row, text in enumerate(corpus.texts)}
        for source in sources:
            for text in source.pairs.positives:
                self.rows.setdefault(text, len(self.rows))
        embeddings = self._encode(list(self.rows), "document", corpus.prompt)
        gamma_d = similarity.gammas[1]
        self.candidates = ExactSearch(embeddings[: len(corpus.texts)], gamma_d=gamma_d)
        self.documents = ExactSearch(embeddings, gamma_d=gamma_d)

    def run(self, source: Source, known: Ids, write: Write, tally: Tally, pairs_at_once: int | None) -> None:
        """Mine the pairs of a source, a block at a time."""
        pairs = source.pairs
        numbers = {text: number for number, text in enumerate(dict.fromkeys(pairs.queries))}
        queries = self._encode(list(numbers), "query", source.prompts.get("query"))
        forbidden = Forbidden(list(numbers), self.corpus, self.sources, known)
        size = pairs_at_once or max(1, min(MOST_PAIRS_AT_ONCE, CANDIDATES_AT_ONCE // self.rule.last))
        done = self.progress.start(f"mine {pairs.name}", len(pairs))
        for start in range(0, len(pairs), size):
            block = [*zip(pairs.queries[start : start + size], pairs.positives[start : start + size], strict=True)]
            asked = np.array([numbers[query] for query, _ in block])
            write(self._rows(block, asked, queries, forbidden, tally))
            done(start + len(block))

    def _rows(
        self, block: list[tuple[str, str]], asked: np.ndarray, queries: np.ndarray, forbidden: Forbidden, tally: Tally
    ) -> Iterator[list[str]]:
        """The rows of these pairs, whose queries have the numbers ``asked``."""
        some, place = np.unique(asked, return_inverse=True)
        prepared = self.similarity.prepare_query(queries[some].astype(np.float64))
        found, scores = self.candidates.search(prepared, self.rule.last, forbidden.of(some))
        own = np.array([[self.rows[positive]] for _, positive in block])
        positives = self.documents.rescore(prepared[place], own, 1)[1][:, 0]
        eligible, skipped = self.rule.eligible(scores[place], positives)
        times = np.bincount(place, minlength=len(some))
        passed_over = times @ self._outranking(prepared, some, scores[:, -1], forbidden)
        duplicates = np.where(found >= 0, self.corpus.copies[found] - 1, 0).sum(axis=1)
        tally.skipped.update(dict(zip(REASONS, passed_over.tolist(), strict=True)))
        tally.skipped.update({DUPLICATE: int(times @ duplicates)})
        tally.skipped.update(skipped)
        for pair, row, mask in zip(block, found[place], eligible, strict=True):
            places = self.rule.choose(mask, pair)
            tally.pairs += 1
            tally.without += not len(places)
            tally.short += 0 < len(places) < self.rule.negatives
            if not len(places) or (len(places) < self.rule.negatives and not self.rule.keep_short):
                continue
            tally.kept += 1
            tally.negatives += len(places)
            tally.ranks += int((places + 1).sum())
            negatives = [self.corpus.texts[candidate] for candidate in row[places]]
            yield from ([*pair, one] for one in negatives) if self.rule.keep_short else [[*pair, *negatives]]

    def _outranking(self, prepared: np.ndarray, some: np.ndarray, last: np.ndarray, forbidden: Forbidden) -> np.ndarray:
        """(queries, reasons) documents that would be among the candidates of each query if they were not forbidden.

        Args:
            prepared: (queries, n) of the queries with the numbers ``some``.
            some: Their numbers, ascending.
            last: (queries,) the score of the last candidate; -inf where there are fewer than asked for.
            forbidden: What no query must get.
        """
        counts = np.zeros((len(some), len(REASONS)), np.int64)
        queries, candidates = forbidden.of(some)
        if not len(queries):
            return counts
        each = np.bincount(queries, minlength=len(some))
        table = np.full((len(some), each.max()), -1)
        table[queries, np.arange(len(queries)) - np.repeat(np.cumsum(each) - each, each)] = candidates
        found, scores = self.documents.rescore(prepared, table, table.shape[1])
        above = (found >= 0) & (scores >= last[:, None])
        query = np.nonzero(above)[0]
        np.add.at(counts, query, forbidden.documents(some[query], found[above]))
        return counts

    def _encode(self, texts: list[str], side: Side, prompt: str | None) -> np.ndarray:
        """(texts, n) raw embeddings, encoded from the longest text to the shortest."""
        order = sorted(range(len(texts)), key=lambda row: (len(texts[row]), texts[row]), reverse=True)
        done: Callable[[int], None] = self.progress.start(f"encode {side} texts", len(texts))
        embeddings = np.empty((0, 0), np.float32)
        step = self.batch_size * BATCHES
        for start in range(0, len(order), step):
            rows = order[start : start + step]
            part = encode(self.model, [texts[row] for row in rows], side, prompt=prompt, batch_size=self.batch_size)
            if not start:
                embeddings = np.empty((len(texts), part.shape[1]), np.float32)
            embeddings[rows] = part
            done(start + len(rows))
        return embeddings


def _grounds(shared: Corpus | None, sources: list[Source]) -> Iterator[tuple[Corpus, list[Source]]]:
    """Each corpus with the sources that are mined from it."""
    if shared is not None:
        yield shared, sources
        return
    for source in sources:
        yield Corpus(source.pairs.name, source.documents, source.prompts.get("document")), [source]


def _columns(rule: Rule) -> list[str]:
    negatives = ["negative"] if rule.keep_short else [f"negative_{number}" for number in range(1, rule.negatives + 1)]
    return ["query", "positive", *negatives]


def _check_output(out: Path, inputs: Sequence[str]) -> None:
    check_form(out)
    if not inputs:
        raise ConfigError("train is missing; give --train COLLECTION, or a file of pairs")
    for one in inputs:
        path = Path(one).expanduser()
        if path.exists() and path.resolve() in (out.resolve(), *out.resolve().parents):
            raise UsageError(f"--out {out} is an input, or lies in the folder of one, {one}; give another name")
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; expected the name of a file")


def _plan(encoder: Encoder, similarity: Similarity, sources: list[Source], rule: Rule) -> Iterator[str]:
    """What is about to be done, and what a reader must know about the data."""
    pairs = sum(len(source.pairs) for source in sources)
    yield (
        f"mine {rule.negatives} of the ranks {rule.first}-{rule.last} for each of {pairs:,} pairs with "
        f"{encoder.source}, ranked under {similarity.name}"
    )
    if encoder.declared is not None and encoder.declared != similarity:
        yield f"note: the model declares {encoder.declared.name}; its hard negatives are those of that similarity"
    for source in sources:
        for text in source.pairs.notes:
            yield f"note: {source.pairs.name}: {text}"
        if source.pairs.negatives:
            yield f"note: {source.pairs.name}: its {len(source.pairs.negatives)} columns of negatives are left out"
        for side, prompt in source.prompts.items():
            if prompt != (encoder.model.prompts.get(side) or ""):
                yield (
                    f"note: {source.pairs.name}: mined with the {side} prompt {prompt!r} of its collection.yaml; "
                    f"training applies the model's, set with --{side}-prompt"
                )


def _prompt(model: SentenceTransformer, side: Side, own: str | None) -> str:
    return (model.prompts.get(side) or "") if own is None else own


def _described(model: SentenceTransformer, source: Source) -> dict[str, Any]:
    return {
        "name": source.pairs.name,
        "fingerprint": source.pairs.fingerprint(),
        "pairs": len(source.pairs),
        "query_prompt": _prompt(model, "query", source.prompts.get("query")),
    }


def _nothing(rule: Rule, tally: Tally) -> str:
    why = ", ".join(f"{count:,} {reason}" for reason, count in tally.skipped.items() if count) or "none"
    needed = "a negative" if rule.keep_short or rule.negatives == 1 else f"{rule.negatives} negatives"
    return (
        f"nothing to write: none of {tally.pairs:,} pairs has {needed} left in the ranks {rule.first}-{rule.last} "
        f"(documents skipped: {why}); widen --range, lower the margins, or ask for fewer --negatives with --keep-short"
    )
