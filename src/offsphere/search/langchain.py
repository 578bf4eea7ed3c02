"""LangChain: embeddings that keep their length, and a retriever over an index that ranks as the model does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from offsphere.diagnosis.subject import open_bare
from offsphere.encoders import encode
from offsphere.errors import EncoderError, UsageError
from offsphere.evaluation.evaluate import OWN, asked_similarity
from offsphere.search.searcher import Searcher
from offsphere.similarity import Similarity

try:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever
except ModuleNotFoundError as error:
    raise UsageError(f"LangChain needs the package {error.name!r}; type: pip install 'offsphere[langchain]'") from error

if TYPE_CHECKING:
    from langchain_core.callbacks import CallbackManagerForRetrieverRun


class OffsphereEmbeddings(Embeddings):
    """Prepared embeddings for a vector store that compares by the inner product.

    A document is d / |d|^gamma_d and a query q / |q|^gamma_q, so that the inner product is the model's score. A store
    that compares by cosine, or divides by length itself, ranks as another model would: choose its inner product, and
    let ``offsphere verify`` prove it.

    Args:
        model: See ``encoders.open_encoder``.
        similarity: What to prepare for; the model's own when None.
        prompts: By side, ``query`` and ``document``, in place of the model's own.
        max_length: Tokens kept of each text.
        batch_size: Texts in one forward pass.
        device: Where to encode.

    Attributes:
        similarity: What the inner products are.

    Raises:
        EncoderError: If the model cannot be opened.
        UsageError: If neither the model nor the caller says which similarity it is.
    """

    def __init__(
        self,
        model: str,
        similarity: str | None = None,
        *,
        prompts: Mapping[str, str] | None = None,
        max_length: int | None = None,
        batch_size: int = 64,
        device: str | None = None,
    ):
        encoder = open_bare(model, max_length, prompts, device)
        self.similarity: Similarity = asked_similarity(similarity or OWN, encoder.declared, model)
        self._model = encoder.model
        self._batch_size = batch_size

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The prepared embedding of each text, behind the document prompt; zero for a text without content.

        Raises:
            EncoderError: If one is NaN or infinite.
        """
        raw = _finite(encode(self._model, texts, "document", batch_size=self._batch_size))
        return self.similarity.prepare_document(raw).tolist()

    def embed_query(self, text: str) -> list[float]:
        """The prepared embedding of a query, behind the query prompt.

        Raises:
            EncoderError: If it is NaN or infinite.
        """
        return self.similarity.prepare_query(_finite(encode(self._model, [text], "query")))[0].tolist()


class OffsphereRetriever(BaseRetriever):
    """The best documents of an index, under its own similarity unless another is asked for.

    A document's ``metadata`` are its own, with ``score``, ``norm`` and ``cosine`` (see ``Hit``) and, where it has one,
    its title. A score is s(q, d) itself, which has no upper bound of 1.

    Attributes:
        index: What ``Index.open`` or ``Shards.open`` gives.
        k: Documents of an answer.
        similarity: What to rank under, if not the similarity of the index.
        where: SQL over id, title, text, norm and metadata.
    """

    index: Searcher
    k: int = 10
    similarity: str | None = None
    where: str | None = None

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        (hits,) = self.index.search([query], self.k, self.similarity, self.where)
        found = []
        for hit in hits:
            measured: dict[str, Any] = {"score": hit.score, "norm": hit.norm, "cosine": hit.cosine}
            title = {"title": hit.title} if hit.title else {}
            found.append(Document(page_content=hit.text, id=hit.id, metadata=hit.metadata | title | measured))
        return found


def _finite(embeddings: np.ndarray) -> np.ndarray:
    if not np.isfinite(embeddings).all():
        raise EncoderError("an embedding is NaN or infinite; encode in float32, and look for a diverged training")
    return embeddings
