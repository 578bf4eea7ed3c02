"""Tables and figures of what the study's folder holds: what diagnosis said beforehand against what won.

    python studies/predictor/analyse.py --out runs/predictor

Reads what ``run.py`` wrote, and writes ``results.csv``, ``cells.csv``, ``predictors.csv``, ``cross_scored.csv``,
``tables.md`` and ``figure.svg`` beside this file. With ``--from-csv`` it starts from the committed ``results.csv`` and
``cells.csv`` instead, so that every figure can be checked without a training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy import stats

HERE = Path(__file__).parent
SIMILARITIES = ("cosine", "dot", "qnorm", "dnorm", "learnable")
MEASURE = "nDCG@10"
RESAMPLES = 10_000
POINTS = 100
"""nDCG is shown times 100."""


def read_results(folder: Path) -> pd.DataFrame:
    """Every nDCG@10 of the finished comparisons; the columns of results.csv, encoders by their name in the study."""
    frames = []
    for file in sorted(folder.glob("*/*/results.csv")):
        frame = pd.read_csv(file, dtype={"seed": "Int64"})
        frame = frame[frame["measure"] == MEASURE].assign(model=file.parts[-3])
        frames.append(frame.assign(training_data=file.parts[-2]))
    return pd.concat(frames, ignore_index=True)


def read_cells(folder: Path, results: pd.DataFrame) -> pd.DataFrame:
    """A row for each encoder and training set: what diagnosis measured and said, and the score of each similarity."""
    rows = []
    for (encoder, training), frame in results.groupby(["model", "training_data"], sort=False):
        said = json.loads((folder / str(encoder) / f"{training}.diagnosis.json").read_text())
        outside = frame[(frame["dataset"] != training) & (frame["similarity"] == frame["scored_as"])]
        means = outside.groupby("similarity")["value"].mean()
        lengths, inner = said["norms"], said["cohens_d"]["within_candidates"]
        rows.append(
            {
                "encoder": encoder,
                "training": training,
                "seeds": frame["seed"].nunique(),
                "query_cv": lengths["query_cv"],
                "document_cv": lengths["document_cv"],
                "cohens_d": said["cohens_d"]["value"],
                "cohens_d_candidates": inner["value"],
                "cohens_d_candidates_low": inner["low"],
                "cohens_d_candidates_high": inner["high"],
                **{f"kappa_{name}": said["fisher"][name]["log10_kappa"] for name in ("qnorm", "dnorm")},
                **{f"shrunk_{name}": said["fisher"][name]["shrinkage_log10_kappa"] for name in ("qnorm", "dnorm")},
                "fisher_call": said["fisher_call"]["similarity"],
                "advice": said["recommendation"]["similarity"],
                "confidence": said["recommendation"]["confidence"],
                **{name: means[name] for name in SIMILARITIES},
            }
        )
    return pd.DataFrame(rows)


def predictions(cells: pd.DataFrame) -> dict[str, pd.Series]:
    """What each predictor says of each cell beforehand: qnorm or dnorm, and for the advice any similarity."""

    def side(keep_document: pd.Series) -> pd.Series:
        return keep_document.map({True: "qnorm", False: "dnorm"})

    return {
        "kappa (Fisher)": side(cells["kappa_qnorm"] < cells["kappa_dnorm"]),
        "kappa, shrunk": side(cells["shrunk_qnorm"] < cells["shrunk_dnorm"]),
        "Cohen's d": side(cells["cohens_d_candidates"] > 0),
        "CV": side(cells["document_cv"] > cells["query_cv"]),
        "advice": cells["advice"],
        "always cosine": pd.Series("cosine", cells.index),
        "always dnorm": pd.Series("dnorm", cells.index),
        "always qnorm": pd.Series("qnorm", cells.index),
        "always learnable": pd.Series("learnable", cells.index),
    }


def score_predictors(cells: pd.DataFrame) -> pd.DataFrame:
    """For each predictor: right calls between qnorm and dnorm, and what its choice loses to the best similarity.

    ``right`` counts cells where it named qnorm or dnorm and that one scored higher than the other out of domain, with
    the exact (Clopper-Pearson) interval. ``regret`` is nDCG@10 (times 100) of the best of the five minus that of the
    choice, ``over_cosine`` that of the choice minus cosine; means over cells, intervals by resampling encoders, because
    the training sets of one encoder are not independent of each other.
    """
    better = np.where(cells["qnorm"] > cells["dnorm"], "qnorm", "dnorm")
    best = cells[[*SIMILARITIES]].max(axis=1)
    rows = []
    for name, choice in predictions(cells).items():
        called = choice.isin(["qnorm", "dnorm"])
        right, calls = int((called & (choice == better)).sum()), int(called.sum())
        exact = stats.binomtest(right, calls).proportion_ci() if calls else None
        chosen = pd.Series([cells.at[row, str(what)] for row, what in choice.items()], cells.index)
        regret, gain = POINTS * (best - chosen), POINTS * (chosen - cells["cosine"])
        rows.append(
            {
                "predictor": name,
                "right": right,
                "calls": calls,
                "accuracy": right / calls if calls else None,
                "accuracy_low": exact.low if exact else None,
                "accuracy_high": exact.high if exact else None,
                **interval("regret", regret, cells["encoder"]),
                **interval("over_cosine", gain, cells["encoder"]),
            }
        )
    return pd.DataFrame(rows)


def cross_scored(results: pd.DataFrame) -> pd.DataFrame:
    """Per encoder: what models trained with length gain out of domain when they are ranked without it.

    ``own`` is scored as cosine minus scored as trained; ``against_cosine`` is scored as cosine minus the cosine-trained
    model, of the same seed; both in nDCG@10 times 100. Intervals resample pairs of training set and data set.
    """
    outside = results[(results["dataset"] != results["training_data"]) & results["similarity"].isin(SIMILARITIES)]
    keys = ["model", "training_data", "seed", "dataset"]
    table = outside.pivot_table(index=keys, columns=["similarity", "scored_as"], values="value")
    rows = []
    for encoder, part in table.groupby(level="model", sort=False):
        groups = part.index.get_level_values("training_data") + " " + part.index.get_level_values("dataset")
        for trained in ("dot", "qnorm", "learnable"):
            as_cosine = part[(trained, "cosine")]
            own = POINTS * (as_cosine - part[(trained, trained)])
            against = POINTS * (as_cosine - part[("cosine", "cosine")])
            rows.append(
                {
                    "encoder": encoder,
                    "trained": trained,
                    **interval("own", own, groups),
                    **interval("against_cosine", against, groups),
                }
            )
    return pd.DataFrame(rows)


def interval(name: str, values: pd.Series, groups: Any) -> dict[str, float]:
    """The mean and its 95 % bootstrap interval over groups."""
    by_group = values.groupby(np.asarray(groups)).agg(["sum", "count"]).to_numpy(float)
    drawn = np.random.default_rng(0).integers(len(by_group), size=(RESAMPLES, len(by_group)))
    sums = by_group[drawn].sum(axis=1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])
    return {name: values.mean(), f"{name}_low": low, f"{name}_high": high}


def correlations(cells: pd.DataFrame, results: pd.DataFrame) -> pd.DataFrame:
    """Spearman correlation, over cells, of what is known beforehand with what training gained."""
    outside = results[(results["dataset"] != results["training_data"])]
    mean = outside.groupby(["model", "training_data", "similarity", "scored_as"])["value"].mean()
    index = list(zip(cells["encoder"], cells["training"], strict=True))
    dot_as_cosine = np.array([mean[(*cell, "dot", "cosine")] for cell in index])
    outcomes = {
        "qnorm - dnorm": cells["qnorm"] - cells["dnorm"],
        "dnorm - cosine": cells["dnorm"] - cells["cosine"],
        "dot scored as cosine - cosine": dot_as_cosine - cells["cosine"],
    }
    known = {
        "log10 kappa(qnorm) - log10 kappa(dnorm)": cells["kappa_qnorm"] - cells["kappa_dnorm"],
        "shrunk kappa, the same": cells["shrunk_qnorm"] - cells["shrunk_dnorm"],
        "Cohen's d among candidates": cells["cohens_d_candidates"],
        "CV of documents": cells["document_cv"],
        "CV of documents / CV of queries": cells["document_cv"] / cells["query_cv"],
    }
    rows = []
    for outcome, gained in outcomes.items():
        for name, values in known.items():
            found = stats.spearmanr(values, gained)
            rows.append({"known before": name, "outcome": outcome, "rho": found.statistic, "p": found.pvalue})
    return pd.DataFrame(rows)


def figure(cells: pd.DataFrame) -> plt.Figure:
    """Left: what kappa predicts against what came out. Right: each magnitude-aware similarity against cosine."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    colours = dict(zip(cells["encoder"].unique(), plt.get_cmap("tab10").colors, strict=False))
    for encoder, part in cells.groupby("encoder", sort=False):
        predicted = part["kappa_qnorm"] - part["kappa_dnorm"]
        left.scatter(predicted, POINTS * (part["qnorm"] - part["dnorm"]), color=colours[encoder], label=encoder)
    left.axhline(0, color="grey", lw=0.8)
    left.axvline(0, color="grey", lw=0.8)
    left.set_xlabel("log10 kappa: qnorm - dnorm, before training\n(above 0: dnorm is predicted)")
    left.set_ylabel("nDCG@10 × 100 out of domain: qnorm - dnorm\n(below 0: dnorm won)")
    left.legend(frameon=False)
    places = np.arange(len(cells))
    for shift, name in enumerate(("dot", "qnorm", "dnorm", "learnable")):
        right.bar(places + 0.2 * shift - 0.3, POINTS * (cells[name] - cells["cosine"]), 0.2, label=name)
    right.axhline(0, color="grey", lw=0.8)
    right.set_xticks(places, cells["encoder"] + "\n" + cells["training"], rotation=90, fontsize=7)
    right.set_ylabel("nDCG@10 × 100 out of domain, minus cosine")
    right.legend(frameon=False)
    return fig


def tables(cells: pd.DataFrame, scored: pd.DataFrame, crossed: pd.DataFrame, related: pd.DataFrame) -> str:
    """The four tables in Markdown."""
    parts = ["| encoder | training | " + " | ".join(SIMILARITIES) + " | kappa | Cohen's d | CV | advice |"]
    parts.append("| --- | --- |" + " ---: |" * len(SIMILARITIES) + " --- | --- | --- | --- |")
    said = predictions(cells)
    for row, cell in cells.iterrows():
        best = max(cell[name] for name in SIMILARITIES)
        shown = [f"**{POINTS * cell[n]:.1f}**" if cell[n] == best else f"{POINTS * cell[n]:.1f}" for n in SIMILARITIES]
        calls = [said[name][row] for name in ("kappa (Fisher)", "Cohen's d", "CV")]
        advice = f"{cell['advice']} ({cell['confidence']})"
        parts.append(f"| {cell['encoder']} | {cell['training']} | {' | '.join([*shown, *calls, advice])} |")
    parts += [
        "",
        "| predictor | right calls | accuracy | regret | over cosine |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for _, one in scored.iterrows():
        accuracy = "" if not one["calls"] else f"{one['accuracy']:.2f} {bounds(one, 'accuracy', 2)}"
        regret, gain = (f"{one[k]:.1f} {bounds(one, k, 1)}" for k in ("regret", "over_cosine"))
        parts.append(f"| {one['predictor']} | {one['right']} of {one['calls']} | {accuracy} | {regret} | {gain} |")
    parts += ["", "| encoder | trained with | as cosine - as trained | as cosine - cosine-trained |"]
    parts.append("| --- | --- | ---: | ---: |")
    for _, one in crossed.iterrows():
        own, against = (f"{one[k]:+.1f} {bounds(one, k, 1)}" for k in ("own", "against_cosine"))
        parts.append(f"| {one['encoder']} | {one['trained']} | {own} | {against} |")
    parts += ["", "| known before training | outcome | Spearman | p |", "| --- | --- | ---: | ---: |"]
    for _, one in related.iterrows():
        parts.append(f"| {one['known before']} | {one['outcome']} | {one['rho']:+.2f} | {one['p']:.3f} |")
    return "\n".join(parts) + "\n"


def bounds(row: pd.Series, name: str, digits: int) -> str:
    """An interval in brackets."""
    return f"[{row[f'{name}_low']:.{digits}f}, {row[f'{name}_high']:.{digits}f}]"


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/predictor"), help="the folder that run.py wrote")
    parser.add_argument("--from-csv", action="store_true", help="start from the committed results.csv and cells.csv")
    parser.add_argument("--to", type=Path, default=HERE, help="where the outcome is written")
    given = parser.parse_args()
    if given.from_csv:
        results = pd.read_csv(HERE / "results.csv", dtype={"seed": "Int64"})
        cells = pd.read_csv(HERE / "cells.csv")
    else:
        results = read_results(given.out)
        cells = read_cells(given.out, results)
    scored, crossed, related = score_predictors(cells), cross_scored(results), correlations(cells, results)
    given.to.mkdir(parents=True, exist_ok=True)
    for name, frame in (("results", results), ("cells", cells), ("predictors", scored), ("cross_scored", crossed)):
        frame.to_csv(given.to / f"{name}.csv", index=False, float_format="%.6g")
    (given.to / "tables.md").write_text(tables(cells, scored, crossed, related), encoding="utf-8")
    plt.rcParams["svg.hashsalt"] = "predictor"
    figure(cells).savefig(given.to / "figure.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
