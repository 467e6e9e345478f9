"""Let SGLang's CPU engine start on a machine that has no CUDA driver.

The wheel of ``sgl_kernel`` that ``sglang`` pins holds CUDA libraries only. They want
``libcuda.so.1``, so on a machine without a driver the import fails although the CPU engine calls
none of them. Where a driver loads, or the CPU engine is not asked for, this module does nothing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import sys
import types
from collections.abc import Sequence

CPU_ENGINE_ENV = "SGLANG_USE_CPU_ENGINE"
TRITON_INTERPRET_ENV = "TRITON_INTERPRET"
_KERNEL_LIBRARY = "common_ops"


def requested(argv: Sequence[str]) -> bool:
    """True if this process, or the parent that started it, was asked for ``--device cpu``.

    ``argv`` is ``sys.orig_argv``: ``sys.argv`` is not set yet while ``sglang`` is imported.
    """
    if os.environ.get(CPU_ENGINE_ENV) == "1":
        return True
    words = list(argv)
    return "--device=cpu" in words or any(
        flag == "--device" and value == "cpu" for flag, value in itertools.pairwise(words)
    )


def driver_loads() -> bool:
    """True if the CUDA driver library can be loaded in this process."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def enable() -> None:
    """Set what the CPU engine needs, for this process and its children.

    Must run before anything imports ``sgl_kernel`` or Triton. Idempotent.
    """
    if driver_loads():
        return
    os.environ[CPU_ENGINE_ENV] = "1"
    # The allocator of paged KV pools launches Triton kernels; interpreted, they run on the CPU.
    os.environ.setdefault(TRITON_INTERPRET_ENV, "1")
    if _KERNEL_LIBRARY not in sys.modules and importlib.util.find_spec(_KERNEL_LIBRARY) is None:
        # sgl_kernel's loader tries `import common_ops` last, and logs its __file__.
        library = types.ModuleType(_KERNEL_LIBRARY, "Stands in for sgl_kernel's CUDA library.")
        library.__file__ = __file__
        sys.modules[_KERNEL_LIBRARY] = library
