"""What destinations of embeddings do to length, as one table; what export says of it, and what it refuses.

A destination keeps the ranking when it compares d / |d|^gamma_d by the inner product and changes neither. One that
divides by length, or compares by angle, ranks as cosine whatever the model was trained for. Every row names the page
or the issue that it rests on.
"""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass
from typing import Any, Literal

from offsphere.errors import ConfigError, StoreError
from offsphere.search.stores import KINDS
from offsphere.similarity import Similarity

Keeps = Literal["yes", "no", "only with"]


@dataclass(frozen=True)
class Destination:
    """One place that embeddings go to or come from, under one setting.

    Attributes:
        name: How ``destination`` finds it; the kind of a target where ``export`` writes to it.
        title: For readers.
        metric: What to choose there.
        score: What a score there is, in q . d of prepared vectors.
        undo: What gives q . d back, or the cosine where length is lost.
        keeps: Whether it keeps the length of documents: ``yes``, ``no``, or ``only with`` the condition.
        condition: Completes ``only with``.
        lost: What would be lost, besides length.
        alternative: Where a model that needs length goes instead.
        sources: The pages and issues that say so; ours for what the tests run.
    """

    name: str
    title: str
    metric: str
    score: str
    undo: str
    keeps: Keeps
    lost: str
    alternative: str
    sources: tuple[str, ...]
    condition: str = ""

    @property
    def exported(self) -> bool:
        """Whether ``export`` writes to it."""
        return self.name in KINDS

    @property
    def keeps_length(self) -> str:
        """For readers: ``yes``, ``no``, or ``only with ...``."""
        return f"{self.keeps} {self.condition}".strip()


TESTED = "tested here against the engine"
NONE = "nothing"
NO_SCORE = "none: it serves vectors"
NOTHING_TO_UNDO = "nothing"
POSITIVE = "1 + q . d, or 1 / (1 - q . d) where q . d < 0; above 0"
UNDO_POSITIVE = "score - 1 where score >= 1, else 1 - 1 / score"
HALVED = "(1 + cosine) / 2, from 0 to 1"
UNDO_HALVED = "2 * score - 1 is the cosine"
COSINE = "the cosine, from -1 to 1"
UNDO_COSINE = "score is the cosine"
DISTANCE = "1 - cosine, from 0 to 2"
UNDO_DISTANCE = "1 - score is the cosine"
OURS = "vectors encoded with offsphere in place of its own"
ELASTIC = "Elasticsearch, Dense vector field type"
LUCENE = "Lucene, VectorSimilarityFunction"
OPENSEARCH = "OpenSearch, Spaces"
WEAVIATE = "Weaviate, Distance metrics"
PINECONE = "Pinecone, Create an index"
VESPA = ("vespa-engine/documentation#2692", "vespa-engine/documentation#1756")

DESTINATIONS: tuple[Destination, ...] = (
    Destination(
        "pgvector", "pgvector", "vector_ip_ops, operator <#>", "-(q . d), the negative; unbounded", "-score", "yes",
        "answers of its HNSW index are approximate; up to 2,000 dimensions are indexed", "",
        (TESTED, "castorini/pyserini#1916", "spring-projects/spring-ai#5713"),
    ),
    Destination(
        "qdrant", "Qdrant, Dot", "Dot", "q . d; unbounded", "score", "yes",
        "answers of a server's HNSW index are approximate; whole numbers in metadata beyond 64 bits are refused", "",
        ("tested here against the embedded engine", "Qdrant, Collections"),
    ),
    Destination(
        "milvus", "Milvus, IP", "IP, index FLAT", "q . d; unbounded", "score", "yes",
        "texts and metadata of more than 65,535 bytes are refused", "",
        ("tested here against milvus-lite", "Milvus, String Field", "milvus-io/milvus#51821"),
    ),
    Destination(
        "chroma", "Chroma, ip", "hnsw space ip", "1 - q . d, a distance; unbounded", "1 - score", "yes",
        "answers of its HNSW graph are approximate; products below 1e-5 lose digits; metadata become one JSON string",
        "", (TESTED, "Chroma, Configure Collections", "chroma-core/chroma#438"),
    ),
    Destination(
        "lancedb", "LanceDB", "dot, in the query", "1 - q . d, a distance; unbounded", "1 - score", "yes", NONE, "",
        (TESTED,),
    ),
    Destination(
        "faiss", "FAISS", "IndexFlatIP", "q . d; unbounded", "score", "yes",
        "the file holds vectors alone; ids and texts lie in a Parquet file beside it", "",
        (TESTED, "FAISS, MetricType and distances", "facebookresearch/faiss#1119"),
    ),
    Destination(
        "parquet", "Parquet", "none: it is a file", "none: rank by q . d", "score", "yes", NONE, "", ("tested here",)
    ),
    Destination(
        "qdrant-cosine", "Qdrant, Cosine", "not this one", COSINE, UNDO_COSINE, "no",
        "vectors are divided by their length on upload, so that the stored ones are not those sent",
        "qdrant, whose collections are Dot", ("tested here against the embedded engine", "qdrant/qdrant#2788"),
    ),
    Destination(
        "milvus-cosine", "Milvus, COSINE", "not this one", COSINE, UNDO_COSINE, "no", NONE,
        "milvus, whose collections are IP", ("Milvus, MetricType",),
    ),
    Destination(
        "chroma-l2", "Chroma, default", "not this one", "|q - d|^2, from 0", "(|q|^2 + 1 - score) / 2, if |d| = 1",
        "no",
        "vectors stay as they are, but long documents are far from every query, so that length counts against them",
        "chroma, whose collections are ip", (TESTED, "chroma-core/chroma#438", "langchain-ai/langchain#21599"),
    ),
    Destination(
        "chroma-cosine", "Chroma, cosine", "not this one", DISTANCE, UNDO_DISTANCE, "no", NONE,
        "chroma, whose collections are ip", (TESTED, "Chroma, Configure Collections"),
    ),
    Destination(
        "elasticsearch-max-inner-product", "Elasticsearch, max_inner_product", "max_inner_product", POSITIVE,
        UNDO_POSITIVE, "yes", "float fields are quantised unless index_options says hnsw", "",
        (ELASTIC, "elastic/elasticsearch#91260"),
    ),
    Destination(
        "elasticsearch-dot-product", "Elasticsearch, dot_product", "max_inner_product", HALVED, UNDO_HALVED, "no",
        "vectors that are not of length 1 are refused", "Elasticsearch, max_inner_product",
        (ELASTIC, "elastic/elasticsearch#91260"),
    ),
    Destination(
        "elasticsearch-cosine", "Elasticsearch, cosine (default)", "max_inner_product", HALVED, UNDO_HALVED, "no",
        "vectors are divided by their length when they are indexed; the zero vector is refused",
        "Elasticsearch, max_inner_product", (ELASTIC,),
    ),
    Destination(
        "opensearch-innerproduct", "OpenSearch, innerproduct", "innerproduct", POSITIVE, UNDO_POSITIVE, "yes", NONE,
        "", (OPENSEARCH,),
    ),
    Destination(
        "opensearch-cosinesimil", "OpenSearch, cosinesimil", "innerproduct", HALVED, UNDO_HALVED, "no",
        "the engine may return vectors that are not those sent; the zero vector is refused",
        "OpenSearch, innerproduct", (OPENSEARCH, "opensearch-project/k-NN#3045", "opensearch-project/k-NN#3083"),
    ),
    Destination(
        "lucene-maximum-inner-product", "Lucene, MAXIMUM_INNER_PRODUCT", "MAXIMUM_INNER_PRODUCT", POSITIVE,
        UNDO_POSITIVE, "yes", "quantised to int7, recall fell from 0.94 to 0.36 in a report; keep float vectors", "",
        (LUCENE, "apache/lucene#12479", "apache/lucene#13350"),
    ),
    Destination(
        "lucene-dot-product", "Lucene, DOT_PRODUCT", "MAXIMUM_INNER_PRODUCT", HALVED, UNDO_HALVED, "no",
        "every vector has to be of length 1, or results are wrong", "Lucene, MAXIMUM_INNER_PRODUCT",
        (LUCENE, "apache/lucene#12342"),
    ),
    Destination(
        "vespa-dotproduct", "Vespa, dotproduct", "dotproduct", "q . d as distance and closeness define it for this "
        "metric", "rank by the dot product in the rank profile", "yes",
        "nothing; the engine appends a dimension that makes all lengths equal, and removes it again", "", VESPA,
    ),
    Destination(
        "vespa-angular", "Vespa, angular (also prenormalized)", "dotproduct", "a function of the angle",
        "as the page says", "no",
        "dividing by length afterwards does not keep the order of a model trained for inner products",
        "Vespa, dotproduct", VESPA,
    ),
    Destination(
        "weaviate-dot", "Weaviate, dot", "dot", "-(q . d), a distance; unbounded", "-score", "yes", NONE, "",
        (WEAVIATE,),
    ),
    Destination(
        "weaviate-cosine", "Weaviate, cosine (default)", "dot", DISTANCE, UNDO_DISTANCE, "no",
        "vectors are divided by their length", "Weaviate, dot", (WEAVIATE, "mem0ai/mem0#5960"),
    ),
    Destination(
        "pinecone-dotproduct", "Pinecone, dotproduct", "dotproduct", "q . d; unbounded", "score", "yes", NONE, "",
        (PINECONE,),
    ),
    Destination(
        "pinecone-cosine", "Pinecone, cosine (default)", "dotproduct", COSINE, UNDO_COSINE, "no", NONE,
        "Pinecone, dotproduct", (PINECONE,),
    ),
    Destination(
        "pgvectorscale", "pgvectorscale", "vector_ip_ops, operator <#>", "-(q . d), the negative; unbounded",
        "-score", "only with", "version 0.5.1 has no vector_ip_ops", "pgvector",
        ("timescale/pgvectorscale#167", "timescale/pgvectorscale#199"),
        "a version that has vector_ip_ops, and any storage but plain",
    ),
    Destination(
        "text-embeddings-inference", "text-embeddings-inference", "the inner product, where its vectors go", NO_SCORE,
        NOTHING_TO_UNDO, "only with", "vectors are divided by their length unless the request says otherwise", OURS,
        ("huggingface/text-embeddings-inference#69", "huggingface/text-embeddings-inference#70"),
        "normalize: false in each request",
    ),
    Destination(
        "llama.cpp", "llama.cpp server", "the inner product, where its vectors go", NO_SCORE, NOTHING_TO_UNDO,
        "only with", "vectors are divided by their length unless the request says otherwise", OURS,
        ("ggml-org/llama.cpp#5954", "ggml-org/llama.cpp#5956", "llama.cpp, embd_normalize"),
        "embd_normalize: -1 in requests to /embedding",
    ),
    Destination(
        "ollama", "Ollama, /api/embed", "the inner product, where its vectors go", NO_SCORE, NOTHING_TO_UNDO, "no",
        "vectors are divided by their length, and no option turns that off; /api/embeddings, which does not divide, is "
        "superseded", OURS,
        ("ollama/ollama#6496", "ollama/ollama#7858", "ollama/ollama#8094"),
    ),
    Destination(
        "infinity", "infinity", "the inner product, where its vectors go", NO_SCORE, NOTHING_TO_UNDO, "no",
        "vectors are divided by their length, and no option turns that off", OURS,
        ("michaelfeil/infinity#262", "michaelfeil/embed#2"),
    ),
    Destination(
        "langchain-in-memory", "LangChain, InMemoryVectorStore", "none to choose", COSINE, UNDO_COSINE, "no", NONE,
        "OffsphereRetriever over an index, or a vector store whose metric is the inner product",
        ("tested here against langchain-core",),
    ),
    Destination(
        "llama-index", "LlamaIndex, its default vector store", "none to choose", COSINE, UNDO_COSINE, "no",
        "its HuggingFaceEmbedding divides by length as well unless normalize is False", OURS +
        ", in a store whose metric is the inner product",
        ("run-llama/llama_index#6118", "run-llama/llama_index#9080", "run-llama/llama_index#8143"),
    ),
    Destination(
        "hosted-widget", "Hosted similarity widgets of a model hub", "none to choose", COSINE, UNDO_COSINE, "no",
        "the page shows cosine for every model", OURS, ("huggingface/api-inference-community#72",),
    ),
)  # fmt: skip
"""Those that ``export`` writes to first, then others by product."""


@dataclass(frozen=True)
class Explanation:
    """What a destination will hold and answer, for a model of one similarity.

    Attributes:
        destination: Its title.
        stored: The vector of a document d.
        query: The vector to search with.
        metric: What the collection compares by.
        score: What the destination calls a score.
        undo: What gives s(q, d) back, or the cosine where the destination has only that.
        range: Of s(q, d).
        length: What becomes of the documents' length.
        lost: What else would be lost.
    """

    destination: str
    stored: str
    query: str
    metric: str
    score: str
    undo: str
    range: str
    length: str
    lost: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(f"  {name:12} {value}" for name, value in asdict(self).items())


def destination(name: str) -> Destination:
    """The row of that name, or of the kind of a target such as ``qdrant:FOLDER#documents``.

    Raises:
        ConfigError: If there is none.
    """
    row = _row(name)
    if row is None:
        names = [each.name for each in DESTINATIONS]
        near = difflib.get_close_matches(name.partition(":")[0].lower(), names, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"unknown destination {name!r}; {guess}Expected one of {', '.join(names)}")
    return row


def explain(target: str, similarity: Similarity) -> Explanation:
    """What will be stored at a destination and what its answers mean.

    Args:
        target: A target, its kind, or the name of any row of ``DESTINATIONS``.
        similarity: What the model ranks by.

    Raises:
        ConfigError: If the destination is unknown.
    """
    row = destination(target)
    gamma_q, gamma_d = similarity.gammas
    needed = _power("d", 1 - gamma_d)
    if gamma_d == 1:
        length = "not ranked by, since gamma_d is 1"
    elif row.keeps == "no":
        length = f"LOST: this ranks as cosine, and the model needs {needed}; use {row.alternative}"
    else:
        length = f"kept as {needed}" + (f", only with {row.condition}" if row.condition else "")
    if row.exported:
        length += "; the raw length is stored beside the vector as norm"
    return Explanation(
        row.title,
        _divided("d", gamma_d),
        _divided("q", gamma_q),
        row.metric,
        row.score,
        "cannot be undone: |d| is gone" if row.keeps == "no" and gamma_d != 1 else row.undo,
        _range(gamma_q, gamma_d),
        length,
        row.lost,
    )


def refuse(name: str, similarity: Similarity) -> None:
    """Nothing, where a destination keeps what the model ranks by.

    Args:
        name: A target, its kind, or the name of any row; a name without a row is left to others.
        similarity: What the model ranks by.

    Raises:
        StoreError: If gamma_d is not 1 and the destination drops length; names the alternative.
    """
    gamma_d = similarity.gammas[1]
    row = _row(name)
    if row is not None and row.keeps == "no" and gamma_d != 1:
        raise StoreError(
            f"{row.title} drops the length of documents ({row.lost if row.lost != NONE else 'it ranks by the angle'}), "
            f"and a model of similarity {similarity} ranks by {_power('d', 1 - gamma_d)}; use {row.alternative}, or "
            f"export with --similarity cosine if ranking by the angle is what you want "
            f"(see {', '.join(row.sources)})"
        )


def _row(name: str) -> Destination | None:
    rows = {row.name: row for row in DESTINATIONS}
    return rows.get(name) or rows.get(name.partition(":")[0])


def _divided(vector: str, gamma: float) -> str:
    return f"{vector} as the model gives it" if gamma == 0 else f"{vector} / {_power(vector, gamma)}"


def _range(gamma_q: float, gamma_d: float) -> str:
    """Where s(q, d) lies: between minus and plus the lengths that are left."""
    most = " ".join(_power(vector, 1 - gamma) for vector, gamma in (("q", gamma_q), ("d", gamma_d)) if gamma != 1)
    return f"-{most} to {most}, not bounded by 1" if most else "-1 to 1, the cosine"


def _power(vector: str, exponent: float) -> str:
    return f"|{vector}|" if exponent == 1 else f"|{vector}|^{exponent:.4g}"
