"""``export-onnx``: the encoder as a graph that runs without torch and ends in the vector to be stored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from offsphere.cli.app import Flag, Shown, about, app, by_side, out, print_json, quiet_libraries


@app.command(epilog="Example: offsphere export-onnx --model runs/first/model --out runs/onnx")
def export_onnx(
    model: Annotated[str, Flag(help=about("model"))],
    out_folder: Annotated[Path, Flag("--out", help="folder to make; an earlier export there is replaced")],
    similarity: Annotated[str | None, Flag(help="what to prepare for, if the model does not say so")] = None,
    query_prompt: Annotated[str | None, Flag(help="text put before each query")] = None,
    document_prompt: Annotated[str | None, Flag(help="text put before each document")] = None,
    max_length: Annotated[int | None, Flag(help=about("max_length"))] = None,
    as_json: Annotated[bool, Flag("--json", help="print the result as JSON")] = False,
) -> None:
    """Write an ONNX graph that gives the prepared vectors and the raw norm, once onnxruntime agrees with the model."""
    quiet_libraries()
    from offsphere.diagnosis.subject import open_bare
    from offsphere.search.onnx_model import export_onnx as run_export

    encoder = open_bare(model, max_length, by_side(query_prompt, document_prompt), "cpu")
    with Shown() as progress:
        written = run_export(encoder, out_folder, similarity=similarity, progress=progress)
    if as_json:
        print_json(written.to_dict())
        return
    out.print(
        f"{written.folder}: {written.bytes / 1e6:,.1f} MB, vectors of {written.dimension} for {written.similarity}; "
        f"{written.probes} of them agree with the model to {written.largest_error:.1e} of their length",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
