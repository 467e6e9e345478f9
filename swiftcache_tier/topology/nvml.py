"""NVIDIA's management library, where there is one."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pynvml  # type: ignore[import-untyped]

logger = logging.getLogger(__name__)


@functools.cache
def load_nvml() -> Any | None:
    """The started library, or None where there is none; that is logged once."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.info("no NVML (%s): what connects GPUs is not known", error)
        return None
    return pynvml


def ask(nvml: Any, question: str, *arguments: Any) -> Any | None:
    """The answer of one of the library's functions; None if it or the driver has none."""
    try:
        return getattr(nvml, question)(*arguments)
    except nvml.NVMLError:
        return None


def handle_of(uuid: str, nvml: Any | None) -> Any | None:
    """The library's handle of a GPU; None if it does not know it."""
    return None if nvml is None else ask(nvml, "nvmlDeviceGetHandleByUUID", uuid)


def pci_address_of(pci: Any) -> str:
    """The address in the kernel's spelling, "0000:3b:00.0", from the library's."""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
