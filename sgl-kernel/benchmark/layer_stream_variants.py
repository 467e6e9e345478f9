"""Ways to queue and to share out the copies of a step, each with a name that can be typed."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, get_args

from swiftcache_kernel.triton_kernels import COUNTED_GRID, Grid

First = Literal["nobody", "compute", "copies"]
Order = Literal["as-now", "lead", "early"]

NAME = re.compile(
    r"(?P<programs>\d+)x(?P<words>\d+)s(?P<stages>\d+)w(?P<warps>\d+)(k(?P<launches>\d+))?"
    r"(,(?P<first>compute|copies)-first)?(,(?P<order>lead|early))?(,(?P<sets>\d+)-sets)?"
)


class Variant(NamedTuple):
    """One way; `str` gives its name and `parse` reads it."""

    grid: Grid
    first: First = "nobody"
    """Whose kernels have the higher priority: as SMs get free, their blocks are placed first."""
    order: Order = "as-now"
    """lead: a layer's compute waits for the scatter before it, so that the gather behind the
    scatter finds SMs before attention takes them. early: the copies follow a layer's attention at
    once, not the first touch of the next layer."""
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
            f"[,compute-first|,copies-first][,{'|,'.join(get_args(Order)[1:])}][,SETS-sets], as in "
            f"{Variant(COUNTED_GRID)}"
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
    "32x2048s3w8",
    "64x2048s3w8",
    "16x4096s4w8",
    "8x4096s4w8",
    "32x4096s4w8",
    "64x4096s4w8",
    "16x2048s3w8",
    "8x2048s3w8",
    # So much shared memory that no two programs share an SM.
    "32x4096s5w8",
    "16x4096s5w8",
    "16x4096s5w8,copies-first",
    "32x4096s5w8,copies-first",
    # When and in what company the programs are placed.
    "32x2048s3w8,copies-first",
    "32x2048s3w8,compute-first",
    "32x2048s3w8,lead",
    "32x2048s3w8,copies-first,lead",
    "32x2048s3w8,early",
    "32x2048s3w8,3-sets",
    "32x2048s3w8k8",
    "32x2048s3w8k8,copies-first",
    # Programs that end soon and take no shared memory: as many as there are tiles, or a part.
    f"{ALL}x1024s1w4",
    f"{ALL}x1024s1w4,compute-first",
    f"{ALL}x512s1w1,compute-first",
    f"{ALL}x2048s1w4,compute-first",
    "4096x1024s1w4,compute-first",
    "1056x1024s1w4k8,compute-first",
    "264x1024s1w4k8,compute-first",
)
