"""Loads the Triton kernels: compiled where there is a GPU, interpreted on the CPU elsewhere."""

from __future__ import annotations

import importlib

import pytest
import torch

# Triton decides when a kernel is defined. The variable is set for that moment only, so that the
# rest of a test run, and servers it starts, see the environment their user gave them.
with pytest.MonkeyPatch.context() as patch:
    if not torch.cuda.is_available():
        patch.setenv("TRITON_INTERPRET", "1")
    # The interpreter loads Gluon at the first launch, and Gluon asks for Triton's own setting.
    importlib.import_module("triton.experimental.gluon")
    for kernels in ("triton_kernels", "triton_block_copy", "triton_checksum"):
        importlib.import_module(f"swiftcache_kernel.{kernels}")
