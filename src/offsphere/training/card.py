"""The model card that goes into a saved model: the formula, the numbers, and what a vector database must be told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from offsphere.config import RunConfig
from offsphere.evaluation.results import Result
from offsphere.similarity import FIXED, Similarity
from offsphere.training.plan import Plan
from offsphere.training.run_folder import Finished

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def model_card(finished: Finished, results: Sequence[Result], config: RunConfig, plan: Plan) -> str:
    """README.md of a trained model.

    Args:
        finished: The variant.
        results: Its rows; those ranked by its own similarity are shown.
        config: What was asked for.
        plan: What was done.
    """
    similarity = finished.similarity
    gamma_q, gamma_d = similarity.gammas
    own = [row for row in results if row.scored_as == similarity.name]
    measures = list(dict.fromkeys(row.measure for row in own))
    values = {(row.dataset, row.measure): row for row in own}
    datasets = dict.fromkeys(row.dataset for row in own)
    rows = "\n".join(
        f"| {data} | {values[data, measures[0]].n_queries} | "
        + " | ".join(f"{100 * values[data, measure].value:.1f}" for measure in measures)
        + " |"
        for data in datasets
    )
    on_hub = _HUB_NAME.fullmatch(config.model) and not Path(config.model).exists()
    base = f"base_model: {config.model}\n" if on_hub else ""
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [sentence-transformers, feature-extraction, dense-retrieval, offsphere, {similarity.name.split("=")[0]}]
{base}---

# {config.model} trained with {similarity.name}

The score of a query q and a document d, from raw embeddings, is

    s(q, d) = (q . d) / (|q|^{gamma_q:.4g} |d|^{gamma_d:.4g})

so {_survives(similarity)}. Scores of this model under another similarity are scores of another model.
{_warning(finished)}
## Use

{_snippet(similarity)}

## In a vector database

{_database(similarity)}

## Training

| setting | value |
| --- | --- |
| start | {config.model} ({config.init}) |
| pairs | {", ".join(config.train)} |
| loss | InfoNCE, in-batch negatives, batches of {plan.batch_size}; known positives are never negatives |
| similarity | {similarity.name}: gamma_q {gamma_q:.4g}, gamma_d {gamma_d:.4g} |
| scale (inverse temperature) | {finished.scale:.4g} |
| steps | {plan.steps}, weights of step {finished.best_step} kept by validation {plan.measure} |
| learning rate | {plan.learning_rate:g}, {plan.schedule} |
| seed | {finished.seed} |

## Results

Ranked by {similarity.name}, in points (hundredths):

| dataset | queries | {" | ".join(measures)} |
| --- | --- | {" | ".join("---" for _ in measures)} |
{rows}

The method is described in [arXiv 2602.09229](https://arxiv.org/abs/2602.09229).
"""


def _warning(finished: Finished) -> str:
    return "" if finished.collapse is None else f"\n**Warning:** {finished.collapse}.\n"


def _survives(similarity: Similarity) -> str:
    return {
        (1.0, 1.0): "only the angle counts",
        (0.0, 0.0): "both lengths count",
        (1.0, 0.0): "the document's length counts and the query's does not",
        (
            0.0,
            1.0,
        ): "the query's length counts and the document's does not: one query ranks as by cosine",
    }.get(similarity.gammas, "part of each length counts")


def _snippet(similarity: Similarity) -> str:
    if similarity.name not in FIXED:
        opening = """from offsphere import open_encoder  # its module applies the exponents

model = open_encoder("path/to/this/folder")"""
        otherwise = "is applied on top of the exponents"
    else:
        opening = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")"""
        otherwise = "undoes what was trained"
    return f"""```python
{opening}
queries = model.encode_query(["how long is a vector"])
documents = model.encode_document(["The length of a vector is the root of the sum of its squared components."])
print(model.similarity(queries, documents))
```

Do not pass `normalize_embeddings=True`: it {otherwise}."""


INNER_PRODUCT = """\
**inner product** (pgvector `vector_ip_ops` with `<#>`, Qdrant `Dot`, Milvus `IP`, FAISS `METRIC_INNER_PRODUCT`). A
store that normalises, or a cosine metric, throws the documents' length away and changes the ranking."""


def _database(similarity: Similarity) -> str:
    gamma_d = similarity.gammas[1]
    if gamma_d == 1.0 and not similarity.learned:
        return (
            "Choose **cosine** (pgvector `vector_cosine_ops` with `<=>`, Qdrant `Cosine`, Milvus `COSINE`), or\n"
            "normalise the documents and use inner product: for one query the ranking is the same."
        )
    if gamma_d == 0.0 and not similarity.learned:
        return f"Store raw embeddings under the metric {INNER_PRODUCT}"
    return f"Store what `encode_document` gives, d / |d|^{gamma_d:.4g}, under the metric {INNER_PRODUCT}"
