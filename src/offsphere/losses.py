"""InfoNCE on raw embeddings under any similarity, with known positives taken out of the negatives.

``info_nce`` is the pure function; ``InfoNCELoss`` makes it a loss for ``SentenceTransformerTrainer``.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from offsphere.errors import ConfigError, TrainingError
from offsphere.gradient_cache import embed_columns
from offsphere.modules import LearnedSimilarity, learned_similarity
from offsphere.processes import count, gather_rows
from offsphere.similarity import Similarity, norms
from offsphere.tiled_loss import MaskRows, tiled_info_nce

ALPHA = 20.0
"""The inverse temperature of the paper (section 4.1), for every variant."""
SATURATED = 10.0
"""Times the automatic scale. Cosine at 100, the sharpest in common use, is at 5; raw products of MiniLM at 20 at 12."""
TILED_FROM = 2**22
Impl = Literal["auto", "reference", "tiled"]

logger = logging.getLogger(__name__)


def info_nce(
    queries: Tensor,
    documents: Tensor,
    similarity: Similarity,
    scale: float | Tensor = ALPHA,
    masked: Tensor | MaskRows | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Mean over queries of -log softmax(scale * s(q_i, .))[i] (paper, equation 1).

    Args:
        queries: (B, n) raw embeddings, any floating dtype.
        documents: (M, n) raw embeddings, M >= B; row i < B is the positive of query i, all other rows its negatives.
        similarity: Its gammas may be tensors in the graph.
        scale: Inverse temperature alpha, a number or a 0-d tensor in the graph.
        masked: (B, M) boolean, true where a document must not count as a negative, or a function that gives its rows
            for a slice of queries. A query's own positive always counts, whatever the mask says.
        impl: ``reference`` holds the (B, M) logits; ``tiled`` never does, and can be differentiated once; ``auto``
            tiles from 4 million logits on, where it is faster as well. They differ by rounding.

    Returns:
        A 0-d tensor in float32 or float64.

    Raises:
        TrainingError: If the loss is not finite, with what to change.
    """
    rows = masked.__getitem__ if isinstance(masked, Tensor) else masked
    if impl == "tiled" or (impl == "auto" and len(queries) * len(documents) >= TILED_FROM):
        loss = tiled_info_nce(queries, documents, similarity, scale, rows)
    else:
        # Masking follows the scaling: -inf times a learned scale would give the scale a gradient of NaN.
        logits = similarity.scores(queries, documents) * scale
        if rows is not None:
            mask = rows(slice(0, len(queries))).clone().fill_diagonal_(False)
            logits = logits.masked_fill(mask, -torch.inf)
        loss = nn.functional.cross_entropy(logits, torch.arange(len(queries), device=logits.device))
    if not torch.isfinite(loss):
        raise TrainingError(
            f"the loss is {loss.item()} under {similarity.detached()!r}: the embeddings or their scores are not finite "
            f"(largest query length {norms(queries.detach()).max().item():.3g}, largest document length "
            f"{norms(documents.detach()).max().item():.3g}). Try a lower --learning-rate, or --scale auto"
        )
    return loss


def auto_scale(similarity: Similarity, query_lengths: Any, document_lengths: Any, alpha: float = ALPHA) -> float:
    """Alpha / (mean|q|^(1-gamma_q) mean|d|^(1-gamma_d)): every variant then starts with the same spread of logits.

    With raw products and alpha 20 the softmax is saturated from the first step and training cannot recover.

    Args:
        similarity: The variant to be trained.
        query_lengths: Lengths of the untrained model's query embeddings, array or tensor; zeros are left out.
        document_lengths: The same for documents.
        alpha: The inverse temperature that a cosine would get.

    Raises:
        TrainingError: If all lengths of a side are 0.
    """
    scale = alpha
    sides = zip(("query", "document"), (query_lengths, document_lengths), similarity.gammas, strict=True)
    for side, lengths, gamma in sides:
        positive = lengths[lengths > 0]
        if len(positive) == 0:
            raise TrainingError(f"every {side} embedding has length 0: the encoder gives nothing to compare")
        scale /= float(positive.mean()) ** (1.0 - gamma)
    return scale


def resolve_scale(
    scale: float | Literal["auto"],
    similarity: Similarity,
    query_lengths: Any,
    document_lengths: Any,
    alpha: float = ALPHA,
) -> float:
    """The scale itself if it is a number, never changed; the automatic one (see ``auto_scale``) otherwise."""
    return auto_scale(similarity, query_lengths, document_lengths, alpha) if scale == "auto" else float(scale)


def warn_of_saturation(scale: float, similarity: Similarity, query_lengths: Any, document_lengths: Any) -> str | None:
    """Why training cannot start well with this scale, with the automatic one beside it; None where it can."""
    automatic = auto_scale(similarity, query_lengths, document_lengths)
    if scale < SATURATED * automatic:
        return None
    return (
        f"scale {scale:g} is {scale / automatic:.0f} times the {automatic:.3g} of --scale auto: with embeddings of "
        "these lengths the softmax is saturated from the first step, nearly all of it on one document, and training "
        "may not recover. It is kept as given"
    )


class KnownPositives:
    """Which documents are relevant to which queries, by integer key.

    Args:
        pairs: (query key, document key) of every known positive.
        n_documents: One more than the largest document key.
    """

    def __init__(self, pairs: Iterable[tuple[int, int]], n_documents: int):
        self.n_documents = n_documents
        self.codes = torch.tensor(sorted({query * n_documents + document for query, document in pairs})).long()


class KnownPositiveMask:
    """Where document m is a positive of query b and so must not be its negative; a slice of queries at a time.

    It is one when its key equals the key of b's own positive, when it is the positive of another row with b's query
    key, or when ``known`` lists it. The diagonal, each query's own positive, is false.

    Args:
        queries: (B,) integer keys; equal keys are the same query.
        documents: (M,) integer keys, the B positives first; equal keys are the same document.
        known: Judgements from beyond the batch.
        positives: (P,) query and document keys of all pairs of the batch, where other processes have more of them.

    Attributes:
        masked: How many pairs the slices given so far hold.
    """

    def __init__(
        self,
        queries: Tensor,
        documents: Tensor,
        known: KnownPositives | None = None,
        positives: tuple[Tensor, Tensor] | None = None,
    ):
        of_queries, of_documents = positives or (queries, documents[: len(queries)])
        if known is None:  # any integers, such as hashes: counted through, so that a pair of them fits an integer
            parts = [queries, documents, of_queries, of_documents]
            numbers = torch.unique(torch.cat(parts), return_inverse=True)[1]
            queries, documents, of_queries, of_documents = numbers.split([len(part) for part in parts])
        self.queries = queries
        self.documents, self.columns = documents.sort()
        self.n_documents = int(documents.max()) + 1 if known is None else known.n_documents
        self.positives = [(of_queries * self.n_documents + of_documents).unique()]
        if known is not None:
            self.positives.append(known.codes.to(queries.device))
        self.masked = 0

    def __call__(self, rows: slice) -> Tensor:
        """(rows, M) boolean."""
        queries = self.queries[rows]
        mask = torch.zeros(len(queries), len(self.columns), dtype=torch.bool, device=queries.device)
        for codes in self.positives:  # few, so that going through them costs less than asking about every pair
            first = queries * self.n_documents
            row, place = _members(codes, first, first + self.n_documents - 1)
            wanted = codes[place] - first[row]
            which, column = _members(self.documents, wanted, wanted)
            mask[row[which], self.columns[column]] = True
        mask.diagonal(rows.start).fill_(False)
        self.masked += int(mask.sum())
        return mask


def known_positive_mask(queries: Tensor, documents: Tensor, known: KnownPositives | None = None) -> Tensor:
    """All (B, M) rows of ``KnownPositiveMask``."""
    return KnownPositiveMask(queries, documents, known)(slice(0, len(queries)))


def _members(values: Tensor, lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
    """For each range, both ends included, all sorted values in it: the number of the range, and the value's place."""
    start = torch.searchsorted(values, lowest)
    number = torch.searchsorted(values, highest, right=True) - start
    ranges = torch.repeat_interleave(number)
    return ranges, torch.arange(len(ranges), device=values.device) + (start - number.cumsum(0) + number)[ranges]


class InfoNCELoss(nn.Module):
    """InfoNCE with in-batch and hard negatives, as a loss of ``SentenceTransformerTrainer``.

    Columns are query, positive, then any number of negatives; every document of the batch is a candidate of every
    query. A document that is known to be relevant to a query is masked out of its negatives: the same text, another
    positive of the same query, or a pair in ``known_positives``. A query with no negative left, such as that of a batch
    of one, adds 0 to the loss and nothing to the gradient.

    Args:
        model: The encoder. If it carries a ``LearnedSimilarity``, that one's gammas and scale are used.
        similarity: One of the five names, gammas, or a Similarity; ``learnable`` needs the module in the model. None
            for that of the model's ``LearnedSimilarity``, or cosine where there is none.
        scale: Inverse temperature: a number, or ``auto`` to measure it on the first batch (see ``auto_scale``). None
            for that of the model's ``LearnedSimilarity``, or 20 where there is none.
        known_positives: Judgements by integer key. The dataset then has a ``label`` column with the keys of the row,
            [query, positive, negative_1, ...]; without it, keys are made from the tokens of the batch.
        impl: See ``info_nce``.
        tokens_per_batch: The most tokens that go through the encoder together, see ``gradient_cache``; None for all.
        tokens_kept: Of how many tokens the activations are kept, where they do not go together.

    Attributes:
        masked_negatives: Pairs masked so far; reset it, and the next two, at will.
        scored_negatives: Pairs of a query and a negative so far, without the masked ones.
        scored_queries: Queries so far.

    Raises:
        ConfigError: If the similarity, the scale or the number of tokens is not understood, or the model's own
            similarity or scale would overrule the one given.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        similarity: str | Mapping[str, Any] | Similarity | None = None,
        scale: float | Literal["auto"] | None = None,
        known_positives: KnownPositives | None = None,
        impl: Impl = "auto",
        tokens_per_batch: int | None = None,
        tokens_kept: int = 0,
    ):
        super().__init__()
        self.impl = impl
        self.tokens_per_batch = tokens_per_batch
        self.tokens_kept = tokens_kept
        self.model = model
        self.fixed_similarity = Similarity.parse("cosine" if similarity is None else similarity)
        self.known_positives = known_positives
        self.masked_negatives = self.scored_negatives = self.scored_queries = 0
        if self.fixed_similarity.learned and learned_similarity(model) is None:
            raise ConfigError(
                "learned gammas live in the model, so that they are saved with it; type: "
                "model.append(LearnedSimilarity(Similarity.parse('learnable')))  # from offsphere.modules"
            )
        if similarity is not None and self.similarity.name != self.fixed_similarity.name:
            raise ConfigError(
                f"similarity {self.fixed_similarity} is given, and the model's LearnedSimilarity carries "
                f"{self.similarity}, which is the one that counts; leave similarity out to train with that, or take "
                "the module off (del model[-1]) to train with yours"
            )
        if scale is None:
            scale = ALPHA
        elif scale != "auto" and not (isinstance(scale, int | float) and 0 < scale < math.inf):
            raise ConfigError(f"scale must be a positive number or 'auto', found {scale!r}")
        elif self.learned is not None:
            own = self.learned.scale.item()
            if scale == "auto" or not math.isclose(scale, own, rel_tol=1e-4):  # kept as a logarithm in float32
                raise ConfigError(
                    f"scale {scale!r} is given, and the model's LearnedSimilarity carries {own:.6g}, which is the one "
                    "that counts; leave scale out to train with that, or give yours where the module is made: "
                    "LearnedSimilarity(similarity, scale)"
                )
        if tokens_per_batch is not None and tokens_per_batch < 1:
            raise ConfigError(f"tokens_per_batch must be a positive number or None, found {tokens_per_batch!r}")
        self.fixed_scale: float | None = None if scale == "auto" else float(scale)

    @property
    def learned(self) -> LearnedSimilarity | None:
        """The module in the model that carries gammas and scale, if there is one."""
        return learned_similarity(getattr(self.model, "module", self.model))

    @property
    def similarity(self) -> Similarity:
        """The similarity in force."""
        return self.learned.similarity if self.learned else self.fixed_similarity

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch from its tokenised columns.

        Args:
            sentence_features: One mapping a column, query first.
            labels: (B, columns) integer keys, or None.
        """
        columns = list(sentence_features)
        if len(columns) < 2:
            raise ConfigError(f"InfoNCE needs a query and a positive column, found {len(columns)} column")
        if labels is not None and labels.shape != (len(labels), len(columns)):
            labels = None  # a score, or whatever else the dataset has in its label column
        if labels is None and self.known_positives is not None:
            raise ConfigError(
                "known_positives needs a column 'label' with the integer keys of each row: [query, positive, "
                f"negative_1, ...], {len(columns)} in all"
            )
        query_keys, document_keys = _keys(columns, labels)
        queries, *documents = embed_columns(self.model, columns, self.tokens_per_batch, self.tokens_kept)
        return self.compute_loss_from_embeddings(queries, torch.cat(documents), query_keys, document_keys)

    def compute_loss_from_embeddings(
        self, queries: Tensor, documents: Tensor, query_keys: Tensor, document_keys: Tensor
    ) -> Tensor:
        """The loss of raw embeddings (B, n) and (M, n), with the integer key of each row.

        Where several processes train together the documents of all are candidates (see ``processes``).
        """
        query_keys, document_keys = query_keys.to(queries.device), document_keys.to(queries.device)
        positives = gather_rows(query_keys), gather_rows(document_keys[: len(queries)])
        documents, document_keys = gather_rows(documents), gather_rows(document_keys)
        mask = KnownPositiveMask(query_keys, document_keys, self.known_positives, positives)
        loss = info_nce(queries, documents, self.similarity, self._scale(queries, documents), mask, self.impl)
        self.masked_negatives += mask.masked
        self.scored_negatives += len(queries) * (len(documents) - 1) - mask.masked
        self.scored_queries += len(queries)
        return loss * (count() * len(queries) / len(positives[0]))  # see ``processes``

    def _scale(self, queries: Tensor, documents: Tensor) -> float | Tensor:
        if self.learned is not None:
            return self.learned.scale
        if self.fixed_scale is None:
            lengths = norms(gather_rows(queries.detach())), norms(documents.detach())
            self.fixed_scale = auto_scale(self.similarity, *lengths)
            logger.info("scale auto: %.4g for %s", self.fixed_scale, self.similarity)
        return self.fixed_scale

    def telemetry(self) -> dict[str, float | None]:
        """The gammas and the scale in force, as plain numbers; the scale is None before ``auto`` has measured it."""
        gamma_q, gamma_d = self.similarity.gammas
        scale = self.learned.scale.item() if self.learned else self.fixed_scale
        return {"gamma_q": gamma_q, "gamma_d": gamma_d, "scale": scale}

    def get_config_dict(self) -> dict[str, Any]:
        """What the model card of sentence-transformers shows."""
        return {"similarity": str(self.similarity), "scale": self.telemetry()["scale"]}


def _keys(columns: list[dict[str, Tensor]], labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Integer keys of the queries (B,) and of the documents (M,): from the labels, or from the tokens."""
    if labels is not None:
        return labels[:, 0], labels[:, 1:].T.reshape(-1)
    queries, *documents = (_token_keys(features) for features in columns)
    return torch.tensor(queries), torch.tensor([key for column in documents for key in column])


def _token_keys(features: dict[str, Tensor]) -> list[int]:
    """A hash of each row's tokens without padding, the same in every process."""
    ids = features["input_ids"].cpu()
    if "offsets" in features:
        rows: Iterable[Tensor] = ids.tensor_split(features["offsets"][1:].cpu())
    else:
        rows = (row[kept.bool()] for row, kept in zip(ids, features["attention_mask"].cpu(), strict=True))
    digests = (hashlib.blake2b(row.numpy().tobytes(), digest_size=8).digest() for row in rows)
    return [int.from_bytes(digest, "big", signed=True) for digest in digests]
