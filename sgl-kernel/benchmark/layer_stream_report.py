"""The figures of streamed steps as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from layer_stream_figures import Case, Figures

# Kernels that take less than this share of the step are not told.
KERNEL_SHARE = 0.01
NAME_CHARACTERS = 60


def as_markdown(figures: Figures) -> str:
    lines = ["# Steps that stream", ""]
    lines += [f"- donor memory: {figures.donor}", f"- attention: {figures.attention}"]
    lines += [f"- plain copy of 256 MiB: {figures.ceiling:.0f} GB/s"]
    lines += [f"- took {figures.seconds:.0f} s", ""]
    if figures.left_out:
        lines += [f"Left out, as the time was over: {figures.left_out} steps.", ""]
    lines += ["## Step / floor", "", *_summary(figures), ""]
    for case in figures.compute_alone:
        lines += [*_case(case, figures), ""]
    if figures.kernels:
        lines += ["## Kernels, ms a step", "", *_kernels(figures.kernels), ""]
    return "\n".join(lines)


def _summary(figures: Figures) -> Iterable[str]:
    """A row for each variant, by its worst case; the floor is the longer of compute and link."""
    cases = list(figures.compute_alone)
    ratios: dict[str, dict[Case, float]] = {}
    for timed in figures.timed:
        of_variant = ratios.setdefault(timed.variant, {})
        of_variant[timed.case] = timed.both / figures.floor_ms(timed.case)
    header = ["variant", "worst", *(f"{case.gigabytes:g} GB, {case.batch}" for case in cases)]
    rows = (
        [
            variant,
            f"{max(of_variant.values()):.2f}",
            *(f"{of_variant[case]:.2f}" if case in of_variant else "" for case in cases),
        ]
        for variant, of_variant in sorted(ratios.items(), key=lambda item: max(item[1].values()))
    )
    return _table(header, rows)


def _case(case: Case, figures: Figures) -> Iterable[str]:
    streamed = figures.streamed_bytes[case.gigabytes]
    yield f"## {streamed / 1e9:.2f} GB, batch of {case.batch}"
    yield ""
    yield (
        f"Compute alone {figures.compute_alone[case]:.2f} ms, link alone "
        f"{streamed / figures.ceiling / 1e6:.2f} ms."
    )
    yield ""
    rows = []
    for timed in figures.timed:
        if timed.case == case:
            rates = [streamed / ms / 1e6 for ms in (timed.copies_alone, timed.both)]
            rows.append(
                [
                    timed.variant,
                    f"{timed.copies_alone:.2f}",
                    f"{rates[0]:.0f}",
                    f"{timed.both:.2f}",
                    f"{rates[1]:.0f}",
                    f"{timed.both / figures.floor_ms(case):.2f}",
                ]
            )
    header = ["variant", "copies alone, ms", "GB/s", "step, ms", "GB/s", "/ floor"]
    yield from _table(header, rows)


def _kernels(kernels: dict[str, dict[str, float]]) -> Iterable[str]:
    names = {name for times in kernels.values() for name in times}

    def longest(name: str) -> float:
        return max(times.get(name, 0.0) for times in kernels.values())

    least = KERNEL_SHARE * max(longest(name) for name in names)
    told = sorted((name for name in names if longest(name) >= least), key=longest, reverse=True)
    rows = (
        [name[:NAME_CHARACTERS], *(f"{times.get(name, 0.0):.2f}" for times in kernels.values())]
        for name in told
    )
    return _table(["kernel", *kernels], rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield from (f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))
