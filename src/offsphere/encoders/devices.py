"""Where an encoder computes: decided once when it is opened, and passed on from there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from offsphere.errors import ConfigError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

AUTO = "auto"

logger = logging.getLogger(__name__)


def resolve_device(device: str | None) -> str:
    """The device to compute on: the one asked for, or the best at hand where it is None or ``auto``.

    Under torchrun, the best one is the GPU of this process.

    Raises:
        ConfigError: If the device asked for is not there, with those that are.
    """
    import torch
    from sentence_transformers.util import get_device_name

    if device is None or device == AUTO:
        return str(get_device_name())
    present = devices_at_hand()
    try:
        asked = torch.device(device)
    except RuntimeError:
        asked = None
    if asked is None or (asked.type if asked.index is None else str(asked)) not in {*present, *_kinds(present)}:
        raise ConfigError(
            f"--device {device}: this machine, as torch sees it, has {', '.join(present)}; type one of them, or leave "
            "it out to use the best one"
        )
    return str(asked)


def devices_at_hand() -> list[str]:
    """What this machine can compute on, the CPU first: ``["cpu", "cuda:0", "cuda:1"]``."""
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu", *(f"{found.type}:{index}" for index in range(torch.accelerator.device_count()) if found)]


def check_operations(model: SentenceTransformer) -> None:
    """Move the encoder to the CPU, with a warning that says why, if its device lacks an operation that it needs.

    MPS does so for some encoders; a short text tells.
    """
    try:
        model.encode("length")
    except NotImplementedError as error:
        reason = str(error).partition("\n")[0]
        logger.warning("%s cannot run this encoder, so it computes on the CPU: %s", model.device, reason)
        model.to("cpu")


def _kinds(devices: list[str]) -> set[str]:
    return {device.partition(":")[0] for device in devices}
