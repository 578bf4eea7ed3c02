"""The similarity family s(q, d) = (q . d) / (|q|^gamma_q |d|^gamma_d): the only place where length is kept or removed.

=========  =======  =======  ==========================
name       gamma_q  gamma_d  what survives
=========  =======  =======  ==========================
cosine     1        1        the angle only
dot        0        0        both lengths
qnorm      1        0        the document's length
dnorm      0        1        the query's length
learnable  trained  trained  what the model finds useful
=========  =======  =======  ==========================

Source: arXiv 2602.09229, section 3. For one query the ranking depends on gamma_d alone, so cosine and dnorm rank
alike, and dot and qnorm rank alike; gamma_q changes the scores across queries and with them how training learns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from offsphere.errors import ConfigError

if TYPE_CHECKING:  # torch takes a second to import, and NumPy users never need it
    from torch import Tensor

Array = TypeVar("Array", np.ndarray, "Tensor")

FIXED: dict[str, tuple[float, float]] = {
    "cosine": (1.0, 1.0),
    "dot": (0.0, 0.0),
    "qnorm": (1.0, 0.0),
    "dnorm": (0.0, 1.0),
}
LEARNABLE = "learnable"
NAMES: tuple[str, ...] = (*FIXED, LEARNABLE)
ROWS = 1024
"""Rows whose gradient is pulled back at a time."""
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_EXPONENTS = re.compile(f"gamma_q={_NUMBER},gamma_d={_NUMBER}", re.ASCII)


@dataclass(frozen=True)
class Similarity:
    """s(q, d) = (q . d) / (|q|^gamma_q |d|^gamma_d), with a zero vector scoring 0.

    Embeddings are rows: queries (Q, n), documents (D, n), NumPy arrays or torch tensors of any floating dtype.
    Lengths and scores are computed in float32, or in float64 where the input is float64.

    Attributes:
        gamma_q: How much of the query's length is removed: 1 all of it, 0 none. A 0-d tensor while it is trained.
        gamma_d: The same for the document.
        learned: Whether the gammas come (or will come) from training; its name is then ``learnable``.

    Raises:
        ConfigError: If a gamma is not a finite number.
    """

    gamma_q: float | Tensor
    gamma_d: float | Tensor
    learned: bool = False

    def __post_init__(self) -> None:
        for side, gamma in (("gamma_q", self.gamma_q), ("gamma_d", self.gamma_d)):
            if hasattr(gamma, "detach"):  # a tensor, still in training
                continue
            if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not math.isfinite(gamma):
                raise ConfigError(f"{side} must be a finite number such as 0, 0.5 or 1, found {gamma!r}")
            object.__setattr__(self, side, float(gamma))

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | Similarity) -> Similarity:
        """A Similarity from any ``name`` of one, a mapping with gamma_q and gamma_d, or another Similarity.

        ``learnable`` starts at gamma 0.5 on both sides, the sigmoid of 0 (paper, section 3).

        Raises:
            ConfigError: If the name is unknown or the mapping has other keys.
        """
        if isinstance(value, Similarity):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        name = str(value)
        if name == LEARNABLE:
            return cls(0.5, 0.5, learned=True)
        if name in FIXED:
            return cls(*FIXED[name])
        if exponents := _EXPONENTS.fullmatch(name):
            return cls(float(exponents[1]), float(exponents[2]))
        raise ConfigError(
            f"unknown similarity {value!r}; expected one of {', '.join(NAMES)}, or exponents such as "
            "gamma_q=0.2,gamma_d=0.9"
        )

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Similarity:
        """The Similarity that ``to_dict`` described.

        Raises:
            ConfigError: If a gamma is missing or a key is unknown.
        """
        unknown = sorted(set(mapping) - {"gamma_q", "gamma_d", "learned"})
        missing = sorted({"gamma_q", "gamma_d"} - set(mapping))
        if unknown or missing:
            raise ConfigError(
                f"a similarity needs gamma_q and gamma_d, such as {{gamma_q: 0.2, gamma_d: 0.9}}; "
                f"found {dict(mapping)!r}"
            )
        return cls(mapping["gamma_q"], mapping["gamma_d"], bool(mapping.get("learned", False)))

    def to_dict(self) -> dict[str, float | bool]:
        """The gammas as plain numbers, and ``learned`` where it is true: what JSON, YAML and a model card store."""
        stored: dict[str, float | bool] = dict(zip(("gamma_q", "gamma_d"), self.gammas, strict=True))
        if self.learned:
            stored["learned"] = True
        return stored

    @property
    def name(self) -> str:
        """One of the five names, or ``gamma_q=0.2,gamma_d=0.9`` for other fixed exponents, in all their digits."""
        if self.learned:
            return LEARNABLE
        for name, fixed in FIXED.items():
            if self.gammas == fixed:
                return name
        return "gamma_q={},gamma_d={}".format(*map(_digits, self.gammas))

    @property
    def gammas(self) -> tuple[float, float]:
        """(gamma_q, gamma_d) as plain numbers."""
        return _number(self.gamma_q), _number(self.gamma_d)

    def detached(self) -> Similarity:
        """The same similarity with plain numbers in place of tensors."""
        return Similarity(*self.gammas, learned=self.learned)

    def prepare_query(self, queries: Array) -> Array:
        """Queries as q / |q|^gamma_q, row by row, so that the score is a plain inner product.

        Args:
            queries: (..., n) raw embeddings.

        Returns:
            The same shape, in float32 or float64. A zero vector stays zero.
        """
        return _remove_length(queries, self.gamma_q)

    def prepare_document(self, documents: Array) -> Array:
        """Documents as d / |d|^gamma_d, row by row: what a vector database stores under the metric inner product.

        Args:
            documents: (..., n) raw embeddings.

        Returns:
            The same shape, in float32 or float64. A zero vector stays zero.
        """
        return _remove_length(documents, self.gamma_d)

    def scores(self, queries: Array, documents: Array) -> Array:
        """Every query against every document.

        Args:
            queries: (Q, n) raw embeddings.
            documents: (D, n) raw embeddings.

        Returns:
            (Q, D) scores in float32 or float64, under autocast as well.
        """
        return _products(self.prepare_query(queries), self.prepare_document(documents))

    def pairwise(self, queries: Array, documents: Array) -> Array:
        """Each query against the document in the same row.

        Args:
            queries: (B, n) raw embeddings.
            documents: (B, n) raw embeddings.

        Returns:
            (B,) scores in float32 or float64.
        """
        return (self.prepare_query(queries) * self.prepare_document(documents)).sum(-1)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        learned = ", learned=True" if self.learned else ""
        gamma_q, gamma_d = map(_digits, self.gammas)
        return f"Similarity(gamma_q={gamma_q}, gamma_d={gamma_d}{learned})"


def norms(embeddings: Array) -> Array:
    """The Euclidean length of each row.

    Args:
        embeddings: (..., n), any floating dtype.

    Returns:
        (...) lengths in float32 or float64; exact for rows from 1e-30 to 1e30 even where the squares would not fit.
    """
    return _lengths(_at_least_float32(embeddings))[..., 0]


def pull_back(embeddings: Tensor, gamma: float | Tensor, gradient: Tensor) -> Tensor:
    """The gradient at gamma, and, in place of the given one, the gradient at raw rows.

    A row e of length l was prepared as p = e / l^gamma. With g the gradient at p, that at e is
    (g - gamma (g . e) e / l^2) / l^gamma, and that at gamma is -ln(l) (g . p), summed over rows. Nothing is put into a
    graph, and nothing larger than some rows is made.

    Args:
        embeddings: (R, n) raw rows.
        gamma: As they were prepared with.
        gradient: (R, n) in float32 or float64, at the prepared rows; overwritten.

    Returns:
        A 0-d tensor; 0 where gamma is the number 0.
    """
    import torch

    at_gamma = gradient.new_zeros(())
    if isinstance(gamma, float) and gamma == 0.0:
        return at_gamma
    with torch.no_grad():
        for rows, part in zip(embeddings.split(ROWS), gradient.split(ROWS), strict=True):
            raw = _at_least_float32(rows)
            lengths = _lengths(raw)
            lengths = lengths.masked_fill(lengths == 0, 1.0)
            directions = raw / lengths
            along = (part * directions).sum(-1, keepdim=True)
            removed = lengths**-gamma
            at_gamma -= (lengths.log() * along * lengths * removed).sum()
            part.sub_(directions.mul_(gamma * along)).mul_(removed)
    return at_gamma


def _products(queries: Array, documents: Array) -> Array:
    """Every inner product. Autocast would compute them in half precision, in which many scores tie."""
    if isinstance(queries, np.ndarray):
        return queries @ documents.T
    import torch

    with torch.autocast(queries.device.type, enabled=False):
        return queries @ documents.T


def _number(gamma: float | Tensor) -> float:
    return gamma if isinstance(gamma, float) else gamma.item()


def _digits(gamma: float) -> str:
    """As short as reads back to the same number."""
    short = f"{gamma:g}"
    return short if float(short) == gamma else repr(gamma)


def _remove_length(embeddings: Array, gamma: float | Tensor) -> Array:
    """Rows divided by their length to the power gamma; zero rows stay zero and keep a finite gradient."""
    embeddings = _at_least_float32(embeddings)
    if isinstance(gamma, float) and gamma == 0.0:
        return embeddings
    lengths = _lengths(embeddings)
    if isinstance(embeddings, np.ndarray):
        return embeddings * np.where(lengths > 0, lengths, np.ones_like(lengths)) ** -_number(gamma)
    exponent = gamma if isinstance(gamma, float) else gamma.to(embeddings.dtype)
    return embeddings * lengths.masked_fill(lengths == 0, 1.0) ** -exponent


def _lengths(embeddings: Array) -> Array:
    """Lengths (..., 1). Dividing by the largest component first keeps the squares in range; a zero row gives 0."""
    if isinstance(embeddings, np.ndarray):
        largest = np.abs(embeddings).max(-1, keepdims=True, initial=0.0)
        safe = np.where(largest > 0, largest, np.ones_like(largest))
        return largest * np.sqrt(((embeddings / safe) ** 2).sum(-1, keepdims=True))
    # The largest component cancels out, so it takes no gradient; a zero row takes none at all, because the
    # square root has an infinite slope there.
    largest = embeddings.detach().abs().amax(-1, keepdim=True)
    zero = largest == 0
    safe = largest.masked_fill(zero, 1.0)
    squares = ((embeddings / safe) ** 2).sum(-1, keepdim=True)
    return (safe * squares.masked_fill(zero, 1.0).sqrt()).masked_fill(zero, 0.0)


def _at_least_float32(embeddings: Array) -> Array:
    """Half and bfloat16 become float32 (their lengths overflow and their scores tie); float64 stays."""
    if isinstance(embeddings, np.ndarray):
        return embeddings if embeddings.dtype == np.float64 else embeddings.astype(np.float32, copy=False)
    return embeddings if str(embeddings.dtype) == "torch.float64" else embeddings.float()
