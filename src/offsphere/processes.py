"""What processes that train together (torchrun, accelerate) do as one: one batch, one gradient, one writer.

The contract: W processes on batches b give the loss and the gradients of one process on the batch W * b, to rounding.
Every process scores its own queries against the documents of all (``gather_rows``), and its loss counts with the factor
W * b / (b_1 + ... + b_W), which is 1 where batches are equal. The mean of these losses over the processes is
the loss of the whole batch, and the mean of the gradients of the parameters is its gradient: both
``average_gradients`` and DistributedDataParallel take that mean, so neither needs another factor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable

from offsphere.errors import OffsphereError, UsageError

T = TypeVar("T")
BUCKET = 2**23
"""Elements of gradients that are averaged together: large enough that the number of messages costs nothing."""

TIMEOUT = timedelta(hours=12)
"""How long a process waits for another one, such as for the first while it ranks a large collection alone. A process
that has died is noticed by torchrun, which ends the others."""

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def join(device: str | None) -> str | None:
    """Join the other processes, if torchrun or accelerate started several; returns the device of this one.

    Args:
        device: What was asked for. Without it each process takes the accelerator of its local rank.

    Raises:
        UsageError: If the environment names several processes and not how to find them.
    """
    device = None if device == "auto" else device
    wanted = os.environ.get("WORLD_SIZE", "1")
    if wanted == "1":
        return device
    if missing := [name for name in ENVIRONMENT if not os.environ.get(name)]:
        raise UsageError(
            f"WORLD_SIZE is {wanted}, so {wanted} processes should train together, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. Start them with: torchrun --nproc-per-node {wanted} -m "
            "offsphere ...; or unset WORLD_SIZE to train in this process alone"
        )
    if device is not None and device not in ("cpu", "cuda"):
        raise UsageError(f"{wanted} processes cannot share the device {device!r}; give cpu or cuda, or leave it out")
    from accelerate import PartialState  # type: ignore[import-untyped]

    on_cpu = device == "cpu" or (device is None and not torch.cuda.is_available())
    state = PartialState(cpu=on_cpu, timeout=TIMEOUT)
    return "cpu" if on_cpu else str(state.device)


def count() -> int:
    """How many processes train together; 1 where nothing was started by torchrun or accelerate."""
    return distributed.get_world_size() if _together() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return distributed.get_rank() if _together() else 0


def is_first() -> bool:
    """Whether this process is the one that writes and prints; known from the environment before processes join."""
    return rank() == 0 if _together() else os.environ.get("RANK", "0") == "0"


def wait() -> None:
    """Until every process is here."""
    if count() > 1:
        distributed.barrier()


def first(work: Callable[[], T]) -> T:
    """What the work gives in the first process, which alone does it; its error too is that of every process.

    Raises:
        OffsphereError: As the work raised it.
    """
    if count() == 1:
        return work()
    outcome: list[T | OffsphereError | None] = [None]
    if rank() == 0:
        try:
            outcome[0] = work()
        except OffsphereError as error:
            outcome[0] = error
    distributed.broadcast_object_list(outcome)
    if isinstance(outcome[0], OffsphereError):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]


def total(value: float) -> float:
    """The sum of a number over the processes."""
    if count() == 1:
        return value
    summed = torch.tensor(value, dtype=torch.float64, device=_device())
    distributed.all_reduce(summed)
    return summed.item()


def anyone(*wishes: bool) -> tuple[bool, ...]:
    """Each wish, true where it is true in any process, so that all do the same."""
    if count() == 1:
        return wishes
    wanted = torch.tensor(wishes, dtype=torch.int32, device=_device())
    distributed.all_reduce(wanted, distributed.ReduceOp.MAX)
    return tuple(map(bool, wanted.tolist()))


def gather_rows(rows: Tensor) -> Tensor:
    """The rows of every process, those of this one first; gradients go back to the process that a row came from.

    Args:
        rows: (b, ...) of any dtype; b may differ between processes.

    Returns:
        (b_1 + ... + b_W, ...). Its backward pass, too, must be run by every process.
    """
    if count() == 1:
        return rows
    sizes = _Gather.apply(torch.tensor([len(rows)], device=rows.device)).tolist()
    padded = nn.functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, max(sizes) - len(rows)))
    parts = _Gather.apply(padded).split(max(sizes))
    order = [rank(), *(other for other in range(count()) if other != rank())]
    return torch.cat([parts[process][: sizes[process]] for process in order])


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its mean over the processes; a parameter that no process used keeps none.

    This stands in for DistributedDataParallel, whose hooks count on one backward pass a step and so fit neither a
    gradient cache, where each process has another number of them, nor parameters that a batch leaves out.
    """
    if count() == 1:
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    used = anyone(*(parameter.grad is not None for parameter in trained))
    bucket: list[Tensor] = []
    for parameter, is_used in zip(trained, used, strict=True):
        if not is_used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        if bucket and (bucket[0].dtype != gradient.dtype or sum(map(Tensor.numel, bucket)) > BUCKET):
            _average(bucket)
            bucket = []
        bucket.append(gradient)
    if bucket:
        _average(bucket)


def same_start(parameters: Iterable[Tensor]) -> None:
    """Give every process the first one's values."""
    if count() > 1:
        for parameter in parameters:
            distributed.broadcast(parameter.data, src=0)


class _Gather(torch.autograd.Function):
    """Tensors of one shape from every process, by rank; each gets back the sum of the gradients that all have of it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(count())]
        distributed.all_gather(parts, own.contiguous())
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> Tensor:
        summed = incoming.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(summed)
        return summed.chunk(count())[rank()]


def _average(gradients: list[Tensor]) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= count()
    for gradient, averaged in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(averaged.view_as(gradient))


def _together() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _device() -> torch.device:
    """Where numbers must be to be sent: NCCL sends from the GPU only."""
    return torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
