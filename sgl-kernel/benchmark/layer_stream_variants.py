"""Ways to queue and to share out the copies of a step, each with a name that can be typed."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from swiftcache_kernel.triton_kernels import COUNTED_GRID, Grid

First = Literal["nobody", "compute", "copies"]
Order = Literal["as-now", "at-entry"]

NAME = re.compile(
    r"(?P<programs>\d+)x(?P<words>\d+)s(?P<stages>\d+)w(?P<warps>\d+)(k(?P<launches>\d+))?"
    r"(,(?P<first>compute|copies)-first)?(,(?P<order>at-entry))?(,(?P<sets>\d+)-sets)?"
)


class Variant(NamedTuple):
    """One way; `str` gives its name and `parse` reads it."""

    grid: Grid
    first: First = "nobody"
    """Whose kernels have the higher priority: as SMs get free, their blocks are placed first."""
    order: Order = "as-now"
    """at-entry: all copies on one stream, and those that follow a layer's attention queued at the
    first touch of the next layer. A gather then comes upon attention that has taken the SMs."""
    sets: int = 2
    """How many layers the window holds at a time."""

    def __str__(self) -> str:
        grid = self.grid
        name = f"{grid.programs}x{grid.tile_words}s{grid.stages}w{grid.warps}"
        if grid.launches > 1:
            name += f"k{grid.launches}"
        if self.first != "nobody":
            name += f",{self.first}-first"
        if self.order != "as-now":
            name += f",{self.order}"
        return name if self.sets == 2 else f"{name},{self.sets}-sets"


def parse(name: str) -> Variant:
    """ValueError, one line, if it names none."""
    match = NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"no variant is named {name!r}; expected PROGRAMSxWORDSsSTAGESwWARPS[kLAUNCHES]"
            f"[,compute-first|,copies-first][,at-entry][,SETS-sets], as in {Variant(COUNTED_GRID)}"
        )
    sizes = [int(match[size] or 1) for size in ("programs", "words", "stages", "warps", "launches")]
    return Variant(
        Grid(*sizes),
        match["first"] or "nobody",
        match["order"] or "as-now",
        int(match["sets"] or 2),
    )


# More programs than any layer has tiles: each moves one tile and ends.
ALL = 1_000_000

DEFAULTS = (
    # What a server does, and other sizes of the same.
    "64x2048s3w8",
    "16x2048s3w8",
    "32x2048s3w8",
    "96x2048s3w8",
    "128x2048s3w8",
    "16x4096s4w8",
    "32x4096s4w8",
    # So much shared memory that no two programs share an SM.
    "16x4096s5w8",
    "12x4096s7w8",
    # When and in what company the programs are placed.
    "32x2048s3w8,at-entry",
    "64x2048s3w8,at-entry",
    "16x4096s5w8,at-entry",
    "64x2048s3w8,copies-first",
    "64x2048s3w8,compute-first",
    "64x2048s3w8,3-sets",
    "64x2048s3w8k8",
    # Programs that end soon and take no shared memory: as many as there are tiles, or a part.
    f"{ALL}x1024s1w4",
    f"{ALL}x1024s1w4,compute-first",
    "264x1024s1w4k8,compute-first",
)
