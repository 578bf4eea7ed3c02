"""Run by ``test_together``: trainings in one process and in several, some of them killed; one import of torch for all.

usage: python workers.py FOLDER, which holds ``encoder`` (a transformer), ``home`` and ``away`` (collections)
"""

from __future__ import annotations

import copy
import os
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import torch
from sentence_transformers import SentenceTransformer
from torch.nn.parallel import DistributedDataParallel

import offsphere.losses
from offsphere import processes
from offsphere.config import TrainConfig
from offsphere.encoders import set_dropout
from offsphere.losses import InfoNCELoss, KnownPositives
from offsphere.modules import LearnedSimilarity
from offsphere.similarity import NAMES, Similarity
from offsphere.training.train import train
from offsphere.training.trainer import RetrieverTrainer

FOLDER = Path(sys.argv[1])
SIZES = {1: [10], 2: [6, 4], 3: [4, 4, 2]}
ROWS = 10
WORDS = [f"topic{topic}word{word}" for topic in range(12) for word in range(6)]
CASES: dict[str, dict[str, Any]] = {
    **{f"{name}, no hard negatives": {"similarity": name, "negatives": 0} for name in NAMES},
    **{f"{name}, 2 hard negatives": {"similarity": name, "negatives": 2} for name in NAMES},
    **{f"{name}, gradient cache": {"similarity": name, "negatives": 2, "tokens": 24} for name in NAMES},
    "tiled": {"similarity": "learnable", "negatives": 2, "impl": "tiled"},
    "without labels": {"similarity": "dot", "negatives": 2, "labels": False},
    "automatic scale": {"similarity": "qnorm", "negatives": 0, "scale": "auto"},
    "float32": {"similarity": "cosine", "negatives": 2, "dtype": torch.float32},
    "DistributedDataParallel": {"similarity": "qnorm", "negatives": 2, "wrapped": True},
    "DistributedDataParallel, gradient cache": {"similarity": "qnorm", "negatives": 2, "wrapped": True, "tokens": 24},
}  # fmt: skip


def texts(seed: int) -> list[str]:
    """Of one to six words."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (ROWS,), generator=draw).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=draw)) for length in lengths]


def one_batch(
    base: SentenceTransformer,
    rows: slice,
    similarity: str,
    negatives: int,
    tokens: int | None = None,
    impl: str = "auto",
    labels: bool = True,
    scale: float | str = 15.0,
    dtype: torch.dtype = torch.float64,
    wrapped: bool = False,
) -> dict[str, Any]:
    """Loss and gradients of this process's rows of the batch, as they count for the step."""
    model = copy.deepcopy(base).to(dtype)
    set_dropout(model, 0.0)
    if similarity == "learnable":
        model.append(LearnedSimilarity(Similarity.parse(similarity), 15.0, learn_scale=True).to(dtype))
    columns = [texts(seed) for seed in range(2 + negatives)]
    columns[0][8], columns[1][9], columns[1][3] = columns[0][1], columns[1][2], columns[2 % len(columns)][7]
    # Rows 1 and 8 are one query, rows 2 and 9 share a document, and a judgement links query 0 with the document of 7.
    keys = torch.arange(ROWS)[:, None] + ROWS * torch.arange(2 + negatives)
    keys[8, 0], keys[9, 1] = keys[1, 0], keys[2, 1]
    known = KnownPositives([(0, int(keys[7, 1]))], n_documents=ROWS * (2 + negatives)) if labels else None
    loss = InfoNCELoss(model, similarity, scale, known, impl, tokens_per_batch=tokens)
    if wrapped and processes.count() > 1:
        model[0].auto_model.pooler.requires_grad_(False)  # no part of the embedding; DDP waits for every gradient
        loss.model = DistributedDataParallel(model)
    features = [model.preprocess(column[rows]) for column in columns]
    value = loss(features, keys[rows] if labels else None)
    value.backward()
    if not wrapped:
        processes.average_gradients(model.parameters())
    return {
        "loss": processes.total(value.item()) / processes.count(),
        "gradients": {name: one.grad for name, one in model.named_parameters() if one.grad is not None},
        "masked": processes.total(loss.masked_negatives),
    }


def contract(world: int) -> None:
    processes.join("cpu")
    sizes, rank = SIZES[world], processes.rank()
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    base = SentenceTransformer(str(FOLDER / "encoder"), device="cpu")
    found = {name: one_batch(base, rows, **case) for name, case in CASES.items()}
    gather = processes.gather_rows

    def other_way(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        offsphere.losses.gather_rows = lambda rows: change(rows) if rows.ndim == 2 else gather(rows)
        try:
            return one_batch(base, rows, "cosine", 2)
        finally:
            offsphere.losses.gather_rows = gather

    found["canary: no gradient"] = other_way(lambda rows: gather(rows.detach()))
    found["canary: PNNPNN"] = other_way(
        lambda rows: gather(rows.view(3, -1, rows.shape[1]).transpose(0, 1).flatten(0, 1))
    )
    found["canary: order of ranks"] = other_way(lambda rows: gather(rows).roll(-len(rows) * processes.rank(), 0))
    torch.save(found, FOLDER / f"contract-{world}-{rank}.pt")


class KilledAt:
    """Progress that ends the first process at a step, as a power cut would."""

    def __init__(self, step: int):
        self.step = step

    def say(self, text: str) -> None:
        with (FOLDER / "said.txt").open("a") as file:
            file.write(text + "\n")

    def start(self, what: str, total: int) -> Callable[[int], None]:
        def done(step: int) -> None:
            if step == self.step and "seed" in what:
                os.kill(os.getpid(), signal.SIGKILL)

        return done


def training(name: str, killed_at: int = 0, divided_by: int = 1, forget_random: bool = False, **changed: Any) -> None:
    """Ten steps, in the middle of the third pass at the end, with all that can be learned."""
    if forget_random:
        RetrieverTrainer._load_rng_state = lambda self, checkpoint: None
    settings = {
        "model": str(FOLDER / "encoder"), "train": [str(FOLDER / "home")], "eval": [str(FOLDER / "away")],
        "similarity": "learnable", "learn_scale": True, "steps": 10, "batch_size": 12 // divided_by,
        "learning_rate": 5e-3, "evaluations": 5, "checkpoint_every": 3, "device": "cpu",
    }  # fmt: skip
    train(TrainConfig(**settings | changed, out=FOLDER / name), KilledAt(killed_at))


def together(world: int, work: Callable[..., None], *args: Any, **named: Any) -> list[int]:
    """Do the work in so many processes; when one dies the others are ended, as torchrun does. Returns their codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = {}
    for rank in range(world):
        child = os.fork()
        if child == 0:
            if world > 1:
                names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
                os.environ |= dict(zip(names, map(str, (rank, rank, world, "127.0.0.1", port)), strict=True))
            try:
                work(*args, **named)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children[child] = rank
    codes = [0] * world
    while children:
        child, status = os.wait()
        codes[children.pop(child)] = code = os.waitstatus_to_exitcode(status)
        if code:
            for other in children:
                os.kill(other, signal.SIGKILL)
    return codes


def check(codes: list[int], expected: int = 0) -> None:
    if codes[0] != expected:
        sys.exit(f"expected {expected} of the first process, found {codes}")


if __name__ == "__main__":
    for world in SIZES:
        check(together(world, contract, world))
    check(together(1, training, "alone"))
    check(together(1, training, "alone-killed", killed_at=8), -signal.SIGKILL)
    shutil.copytree(FOLDER / "alone-killed", FOLDER / "alone-forgetful")
    check(together(1, training, "alone-killed"))
    check(together(1, training, "alone-forgetful", forget_random=True))
    check(together(2, training, "two", divided_by=2))
    check(together(2, training, "two-killed", divided_by=2, killed_at=8), -signal.SIGKILL)
    check(together(2, training, "two-killed", divided_by=2))
    still = {"dropout": 0.0, "steps": 6, "learning_rate": 1e-3}
    check(together(1, training, "still-1", **still))
    check(together(2, training, "still-2", divided_by=2, **still))
