"""Where an encoder computes: one decision, for every command."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module

from offsphere.encoders import encode, open_encoder, opening, resolve_device
from offsphere.encoders.devices import check_operations, devices_at_hand
from offsphere.errors import ConfigError

ACCELERATED = torch.accelerator.is_available()


@pytest.mark.parametrize("asked", [None, "auto"])
def test_the_best_device_at_hand(asked, static, save):
    device = resolve_device(asked)
    assert (device == "cpu") != ACCELERATED
    assert open_encoder(save(static), device=asked).device == torch.device(device)


def test_the_cpu_is_always_there(static, save):
    """T-L6: asked for, it is used, whatever else the machine has."""
    assert devices_at_hand()[0] == "cpu" and resolve_device("cpu") == "cpu"
    assert open_encoder(save(static), device="cpu").device.type == "cpu"


@pytest.mark.skipif(ACCELERATED, reason="this machine has an accelerator")
@pytest.mark.parametrize("asked", ["cuda", "cuda:1", "mps", "cuda:99", "gpu", "", "meta"])
def test_a_device_that_is_not_there(asked, static, save):
    with pytest.raises(ConfigError, match=f"--device {asked}: this machine, as torch sees it, has cpu; type one"):
        open_encoder(save(static), device=asked)


def test_mps_is_asked_whether_it_lacks_an_operation(static, save, monkeypatch):
    """T-L6: when an encoder is opened there, once, and nowhere else."""
    folder, checked = save(static), []
    monkeypatch.setattr(opening, "check_operations", checked.append)
    assert open_encoder(folder, device="cpu").device.type == "cpu" and checked == []
    with monkeypatch.context() as patch:
        patch.setattr(SentenceTransformer, "device", torch.device("mps"))
        opened = open_encoder(folder, device="cpu")
    assert checked == [opened]


def test_mps_at_hand(monkeypatch):
    """It has no number of its own, and is asked for without one."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert devices_at_hand() == ["cpu", "mps:0"]
    assert [resolve_device(asked) for asked in ("cpu", "mps", "mps:0")] == ["cpu", "mps", "mps:0"]
    for asked in ("cuda", "mps:1"):
        with pytest.raises(ConfigError, match=f"--device {asked}: this machine, as torch sees it, has cpu, mps:0; "):
            resolve_device(asked)


class Picky(Module):
    """Lacks an operation until it is moved to the CPU, as some devices do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.moved = False

    def _apply(self, function, recurse=True):
        self.moved = True
        return super()._apply(function, recurse)

    def save(self, output_path, *args, **kwargs):
        """Nothing to save."""

    def forward(self, features):
        if not self.moved:
            raise NotImplementedError("The operator 'aten::foo' is not currently implemented here.\nSet a variable.")
        return features


def test_a_device_that_lacks_an_operation(static, caplog, sentences):
    """T-L6: the encoder goes to the CPU, and the log names the operation."""
    expected = encode(static, sentences(3, 0), "query")
    static.append(Picky())
    with caplog.at_level(logging.WARNING, "offsphere"):
        check_operations(static)
    assert [record.message for record in caplog.records] == [
        "cpu cannot run this encoder, so it computes on the CPU: The operator 'aten::foo' is not currently "
        "implemented here."
    ]
    assert static.device.type == "cpu"
    np.testing.assert_array_equal(encode(static, sentences(3, 0), "query"), expected)


def test_a_device_that_lacks_nothing(static, caplog):
    check_operations(static)
    assert not caplog.records
