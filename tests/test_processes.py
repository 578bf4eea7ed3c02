"""One process alone, and environments that lack what several need; ``training/test_together`` runs several."""

from __future__ import annotations

import pytest
import torch

from offsphere import processes
from offsphere.errors import UsageError

SET = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in processes.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("world", [None, "1"])
def test_alone_there_is_nobody_to_join(environment: pytest.MonkeyPatch, world: str | None) -> None:
    if world is not None:
        environment.setenv("WORLD_SIZE", world)
    assert processes.join("cpu") == "cpu"
    assert processes.join(None) is None
    assert (processes.count(), processes.rank(), processes.is_first()) == (1, 0, True)


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_an_environment_is_named(environment: pytest.MonkeyPatch, missing: str) -> None:
    for name, value in SET.items():
        if name != missing:
            environment.setenv(name, value)
    with pytest.raises(UsageError, match=rf"WORLD_SIZE is 2.*but {missing} is not set.*torchrun --nproc-per-node 2"):
        processes.join(None)


def test_processes_cannot_share_one_device(environment: pytest.MonkeyPatch) -> None:
    for name, value in SET.items():
        environment.setenv(name, value)
    with pytest.raises(UsageError, match="2 processes cannot share the device 'cuda:1'"):
        processes.join("cuda:1")


def test_the_first_process_is_known_before_they_join(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("RANK", "1")
    assert not processes.is_first()


def test_alone_everything_is_as_it_was() -> None:
    rows = torch.arange(6.0).view(3, 2).requires_grad_()
    assert processes.gather_rows(rows) is rows
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    processes.average_gradients([parameter])
    assert parameter.grad.tolist() == [3.0, 3.0]
    assert processes.total(2.5) == 2.5
    assert processes.anyone(True, False) == (True, False)
    assert processes.first(lambda: 7) == 7
    processes.wait()
