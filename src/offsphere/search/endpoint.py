"""What an OpenAI-compatible embeddings server makes of texts, beside the model that it should serve."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np

from offsphere.diagnosis.subject import open_bare
from offsphere.diagnosis.variation import coefficient_of_variation
from offsphere.encoders import encode
from offsphere.errors import ConfigError, EncoderError
from offsphere.progress import Progress, Silent
from offsphere.search.causes import COSINE, SAME, SAME_DIRECTION, length_law, relative_errors
from offsphere.search.other_encodings import other_encodings
from offsphere.similarity import FIXED, Similarity, norms

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

TIMEOUT = 60.0
LARGEST_ANSWER = 64 * 2**20
PROBES = (
    "rain",
    "why is the sky blue?",
    "iron rusts in wet air",
    "The tide follows the moon.",
    "how do bees find their way home",
    "A recipe for bread: flour, water, salt, yeast, time.",
    "The river carried sand and stone down to the sea for a thousand years.",
    "What is the difference between a star and a planet?",
    "Please bring the signed contract, two copies, to the meeting on Thursday at nine.",
    "Ice melts at zero degrees, and salt makes it melt at a lower temperature than that.",
    "The night train leaves from the second platform; passengers without a seat may wait in the hall.",
    "In 1869 a chemist put the elements in the order of their weights, left gaps, and said what would fill them.",
)
"""Texts of different length and matter, so that raw lengths differ between them."""

SINGLES = 3  # probes that are also sent alone
SAME_RATIO = 0.01  # lengths that agree to a hundredth: half precision and other devices move them less


@dataclass(frozen=True)
class Served:
    """Whether a similarity ranks through the endpoint as it does with the model.

    Attributes:
        similarity: Its name.
        ranks: Whether the order of documents is the model's for every query.
        scores: Whether the scores are the model's too.
        sentence: Why.
    """

    similarity: str
    ranks: bool
    scores: bool
    sentence: str


@dataclass(frozen=True)
class EndpointCheck:
    """What the probe measured; lengths are of raw embeddings.

    Attributes:
        url: Where texts were sent.
        model: The local one.
        dimension: Of the endpoint's embeddings.
        own_dimension: Of the model's.
        deterministic: Whether the same request gave the same embeddings twice.
        order_kept: Whether each text of a batch got the embedding that it gets alone.
        encoding: How the endpoint encodes, in words: ``as the model without a prompt``, or what differs.
        same_direction: Whether the directions are the model's, with or without one of its prompts.
        cosine: Median cosine of endpoint and model, each text encoded without a prompt.
        norm_mean: Mean length at the endpoint.
        norm_cv: Its coefficient of variation.
        own_norm_mean: Mean length at the model.
        own_norm_cv: Its coefficient of variation.
        ratio: Mean of endpoint length / model length.
        ratio_cv: Its coefficient of variation: 0 where lengths agree up to one factor.
        gamma: Power of the length that the endpoint removes: 0 none, 1 all of it; None where lengths cannot tell.
        long_text: What happens to a text beyond the model's limit.
        served: A verdict for each fixed similarity, and for the model's own.
        own: The name of the model's own similarity, if it has one.
        passed: Whether the own similarity ranks as the model; without one, whether all do.
    """

    url: str
    model: str
    dimension: int
    own_dimension: int
    deterministic: bool
    order_kept: bool
    encoding: str
    same_direction: bool
    cosine: float
    norm_mean: float
    norm_cv: float
    own_norm_mean: float
    own_norm_cv: float
    ratio: float
    ratio_cv: float
    gamma: float | None
    long_text: str
    served: list[Served]
    own: str | None
    passed: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, for JSON."""
        return asdict(self)


class Endpoint:
    """An embeddings server that speaks OpenAI's protocol.

    Args:
        url: ``http://host:8080``, which gets ``/v1/embeddings``, or the whole address.
        name: What the server calls the model.
        key_env: Environment variable that holds the key, sent as a bearer token.
        timeout: Seconds that one request may take.

    Raises:
        ConfigError: If the address is no http address, or the variable is not set.
    """

    def __init__(self, url: str, name: str, key_env: str | None = None, timeout: float = TIMEOUT):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"expected an address such as http://localhost:8080, found {url!r}")
        path = parts.path.rstrip("/")
        completed = {"": "/v1/embeddings", "/v1": "/v1/embeddings"}.get(path, path)
        self.url = parts._replace(path=completed).geturl()
        self.name = name
        self.timeout = timeout
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key_env is not None:
            key = os.environ.get(key_env)
            if not key:
                raise ConfigError(f"--key-env names {key_env}, which is not set; type: export {key_env}=...")
            self._headers["Authorization"] = f"Bearer {key}"

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """(len(texts), n) float32 in the order of the texts, by the ``index`` of each answer where there is one.

        Raises:
            EncoderError: If the server cannot be reached, refuses, or answers with something else than embeddings.
        """
        answer = self._post({"model": self.name, "input": list(texts), "encoding_format": "float"})
        rows = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) and "embedding" in row for row in rows):
            raise self._wrong(f'expected {{"data": [{{"embedding": [...]}}, ...]}}, found {_short(answer)}')
        if len(rows) != len(texts):
            raise self._wrong(f"{len(texts)} texts were sent and {len(rows)} embeddings came back")
        indexes = [row.get("index") for row in rows]
        if any(index is not None for index in indexes):
            if any(indexes.count(place) != 1 for place in range(len(rows))):
                raise self._wrong(f"the indexes of {len(rows)} embeddings are {indexes}")
            rows = sorted(rows, key=lambda row: row["index"])
        try:
            embeddings = np.array([row["embedding"] for row in rows], dtype=np.float32)
        except (ValueError, TypeError):
            raise self._wrong(f"the embeddings are no lists of as many numbers each: {_short(rows)}") from None
        if embeddings.ndim != 2 or not embeddings.shape[1] or not np.isfinite(embeddings).all():
            raise self._wrong(f"embeddings have shape {embeddings.shape} or values that are NaN or infinite")
        return embeddings

    def _post(self, body: Mapping[str, Any]) -> Any:
        request = Request(self.url, json.dumps(body).encode(), self._headers, method="POST")
        try:
            with urlopen(request, timeout=self.timeout) as response:
                content = response.read(LARGEST_ANSWER + 1)
        except HTTPError as error:
            with error:
                told = error.read(500).decode("utf-8", "replace")
            raise self._wrong(f"HTTP {error.code}: {told.strip() or error.reason}{_advice(error.code)}") from None
        except (URLError, TimeoutError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise EncoderError(
                f"cannot reach {self.url}: {reason}; start the server, or correct the address"
                if not isinstance(reason, TimeoutError)
                else f"{self.url} did not answer within {self.timeout:g} s; is the model still loading?"
            ) from None
        if len(content) > LARGEST_ANSWER:
            raise self._wrong(f"the answer is longer than {LARGEST_ANSWER // 2**20} MB")
        try:
            return json.loads(content)
        except ValueError:
            raise self._wrong(f"expected JSON, found {_short(content.decode('utf-8', 'replace'))}") from None

    def _wrong(self, what: str) -> EncoderError:
        return EncoderError(f"{self.url}: {what}")


def verify_endpoint(
    url: str,
    model: str,
    *,
    name: str | None = None,
    key_env: str | None = None,
    similarity: str | None = None,
    texts: Sequence[str] = PROBES,
    max_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
    device: str | None = None,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> EndpointCheck:
    """What an embeddings server does to direction and length, and which similarities survive it.

    Args:
        url: Of the server, see ``Endpoint``.
        model: The encoder that it should serve (see ``open_encoder``).
        name: What the server calls it; ``model`` by default.
        key_env: Environment variable with the key.
        similarity: The one to pass; the model's own by default.
        texts: What to send: at least 4 different texts.
        max_length: Tokens kept of each text by the local model.
        prompts: By side, in place of the model's own.
        device: Where the local model encodes.
        timeout: Seconds that one request may take.
        progress: Told what happens.

    Raises:
        ConfigError: If the address or the key is missing, or there are too few texts.
        EncoderError: If the server or the model cannot be used.
    """
    progress = progress or Silent()
    texts = list(dict.fromkeys(text for text in texts if text.strip()))
    if len(texts) < 4:
        raise ConfigError(f"at least 4 different texts are needed to compare lengths, found {len(texts)}")
    endpoint = Endpoint(url, name or model, key_env, timeout)
    progress.say(f"send {len(texts)} texts to {endpoint.url}")
    served = endpoint.embed(texts)  # before the model is opened: a server that is down is told at once
    again = endpoint.embed(texts)
    alone = np.concatenate([endpoint.embed([text]) for text in texts[:SINGLES]])
    if not served.shape[1] == again.shape[1] == alone.shape[1]:
        raise EncoderError(f"{endpoint.url}: embeddings change their dimension from one request to the next")
    encoder = open_bare(model, max_length, prompts, device)
    own = encoder.declared if similarity is None else Similarity.parse(similarity)
    raw = encode(encoder.model, texts, "query", prompt="")
    if raw.shape[1] != served.shape[1]:
        raise EncoderError(
            f"{endpoint.url} gives {served.shape[1]} dimensions and {model} {raw.shape[1]}: it serves another model, "
            "or a part of each embedding; give the model that it serves, or correct the server"
        )
    plain = float(np.median(COSINE.pairwise(served, raw)))
    found = _recognise(encoder.model, texts, served, raw)
    order_kept = bool(np.min(COSINE.pairwise(served[: len(alone)], alone)) >= SAME_DIRECTION)
    deterministic = bool(relative_errors(served, again).max() <= SAME)
    law = length_law(found.raw, served)
    lengths, own_lengths = norms(served), norms(found.raw)
    ratios = lengths / np.where(own_lengths > 0, own_lengths, 1.0)
    wrong = found.wrong
    if not order_kept:
        wrong = "a text gets another embedding in a batch than alone: the server mixes up the order"
    elif not deterministic:
        wrong = "the same request gives other embeddings the second time"
    asked = {fixed: Similarity(*gammas) for fixed, gammas in FIXED.items()}
    if own is not None:
        asked[own.name] = own
    verdicts = [_verdict(one, wrong, ratios) for one in asked.values()]
    return EndpointCheck(
        url=endpoint.url,
        model=model,
        dimension=served.shape[1],
        own_dimension=raw.shape[1],
        deterministic=deterministic,
        order_kept=order_kept,
        encoding=found.sentence,
        same_direction=found.same,
        cosine=plain,
        norm_mean=float(lengths.mean()),
        norm_cv=coefficient_of_variation(lengths),
        own_norm_mean=float(own_lengths.mean()),
        own_norm_cv=coefficient_of_variation(own_lengths),
        ratio=float(ratios.mean()),
        ratio_cv=coefficient_of_variation(ratios),
        gamma=None if np.isnan(law.gamma) or law.spread > SAME_RATIO or not found.same else law.gamma,
        long_text=_long_text(endpoint, encoder.model, texts, found.prompt) if found.same else "not compared",
        served=verdicts,
        own=None if own is None else own.name,
        passed=all(one.ranks for one in verdicts if own is None or one.similarity == own.name),
    )


@dataclass(frozen=True)
class _Recognised:
    """How the endpoint encodes: the prompt and raw embeddings that fit it best, and why that ranks wrongly, if so."""

    same: bool
    sentence: str
    prompt: str
    raw: np.ndarray
    wrong: str | None


def _recognise(model: SentenceTransformer, texts: list[str], served: np.ndarray, raw: np.ndarray) -> _Recognised:
    """The encoding of the local model that gives the endpoint's directions."""

    def cosine(embeddings: np.ndarray) -> float:
        return float(np.median(COSINE.pairwise(served, embeddings))) if embeddings.shape == served.shape else -1.0

    own = {side: text for side in ("query", "document") if (text := model.prompts.get(side))}
    with_prompt = {side: encode(model, texts, "query", prompt=prompt) for side, prompt in own.items()}
    side = max(with_prompt, key=lambda side: cosine(with_prompt[side]), default=None)
    if cosine(raw) >= SAME_DIRECTION and (side is None or cosine(raw) >= cosine(with_prompt[side])):
        sentence = "as the model without a prompt"
        if own:
            shown = " and ".join(f"{text!r} before each {side}" for side, text in own.items())
            sentence += f"; put {shown} yourself"
        return _Recognised(True, sentence, "", raw, None)
    if side is not None and cosine(with_prompt[side]) >= SAME_DIRECTION:
        sentence = f"as the model with its {side} prompt {own[side]!r}, which the server adds to every text"
        one_side = any(model.prompts.get(other, "") != own[side] for other in ("query", "document"))
        wrong = f"the server adds the {side} prompt {own[side]!r} to the other side as well" if one_side else None
        return _Recognised(True, sentence, own[side], with_prompt[side], wrong)
    for other in other_encodings(model, texts, "query", ""):
        if other.cause != "prompt" and cosine(embeddings := other.embed()) >= SAME_DIRECTION:
            return _Recognised(False, other.sentence, "", embeddings, f"the server differs: {other.sentence}")
    sentence = f"another model, or a prompt that the model does not name: median cosine {cosine(raw):.3f}"
    return _Recognised(False, sentence, "", raw, sentence)


def _verdict(similarity: Similarity, wrong: str | None, ratios: np.ndarray) -> Served:
    """Whether rankings and scores under a similarity are the model's; ``ratios`` are lengths in lengths of ours."""
    gamma_q, gamma_d = similarity.gammas
    if wrong is not None:
        return Served(similarity.name, False, False, wrong)
    if gamma_q == gamma_d == 1.0:
        return Served(similarity.name, True, True, "needs the direction only")
    if coefficient_of_variation(ratios) <= SAME_RATIO:
        mean = float(ratios.mean())
        if abs(mean - 1) <= SAME_RATIO:
            return Served(similarity.name, True, True, "lengths are the model's")
        return Served(similarity.name, True, False, f"lengths are {mean:.4g} times the model's; so the order stays")
    if gamma_d == 1.0:
        lost = "queries lose their length: the order stays, scores of different queries no longer compare"
        return Served(similarity.name, True, False, lost)
    return Served(similarity.name, False, False, "documents lose their length, which this similarity ranks by")


def _long_text(endpoint: Endpoint, model: SentenceTransformer, texts: list[str], prompt: str) -> str:
    """What the endpoint does to a text three times as long as the model reads."""
    limit = model.max_seq_length
    limit = None if limit is None or np.isinf(limit) else int(limit)  # a static table reads everything
    words = 3 * (limit or 512)
    # The matter changes along the text, so that where it is cut can be seen.
    repeats = -(-words // sum(len(text.split()) for text in texts))
    long = " ".join(text for text in texts for _ in range(repeats))
    try:
        served = endpoint.embed([long])
    except EncoderError as error:
        return f"refused: {error}"
    cosine = float(COSINE.pairwise(served, encode(model, [long], "query", prompt=prompt))[0])
    if cosine >= SAME_DIRECTION:
        return "read as by the model" if limit is None else f"cut as by the model, after {limit} tokens"
    for other in other_encodings(model, [long], "query", prompt):
        if other.cause == "max_length" and COSINE.pairwise(served, other.embed())[0] >= SAME_DIRECTION:
            return other.sentence
    cut = "reads it whole" if limit is None else f"cuts it after {limit} tokens"
    return f"read differently: cosine {cosine:.3f} to the model, which {cut}"


def _advice(code: int) -> str:
    """What to type after an HTTP error."""
    return {
        400: "; give the server's name of the model with --name",
        401: "; give the environment variable that holds the key with --key-env",
        403: "; the key may not use this model",
        404: "; give the whole address of the embeddings, or the server's name of the model with --name",
        413: "; the server takes smaller requests only",
        429: "; wait, the server limits requests",
    }.get(code, "")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return repr(text[:120] + ("..." if len(text) > 120 else ""))
