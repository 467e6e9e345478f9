"""Whether SGLang's admission may look at a request: what is lent, or the layer window, has a say.

The flags exclude a server with both. One hook chooses, since SGLang warns of two around one
function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.swiftcache.donation_wiring import donation_of, hold_admission
from sglang.srt.swiftcache.layer_stream import wiring as stream_wiring


def add_one_req(
    original: Callable[..., Any], adder: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """PrefillAdder.add_one_req."""
    donation = donation_of(adder)
    if donation is None:
        return stream_wiring.add_one_req(original, adder, request, *args, **kwargs)
    return hold_admission(donation, original, adder, request, *args, **kwargs)
