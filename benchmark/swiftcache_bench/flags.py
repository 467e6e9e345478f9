"""Command-line flags that the scripts share, under upstream's names, and what they mean."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.load import Arrivals, LoadSettings
from swiftcache_bench.tokens import read_vocab_size, text_encoder, usable_ids
from swiftcache_bench.workload.base import Workload
from swiftcache_bench.workload.contexts import load_contexts
from swiftcache_bench.workload.datasets import DatasetKind, dataset_kind
from swiftcache_bench.workload.generated import (
    GeneratedShape,
    generate_contexts,
    generate_conversations,
)
from swiftcache_bench.workload.leval import load_leval
from swiftcache_bench.workload.limits import Limits
from swiftcache_bench.workload.mooncake import TRACE_BLOCK_TOKENS, load_mooncake
from swiftcache_bench.workload.sharegpt import load_sharegpt

DEFAULT_ROUNDS = 5
DEFAULT_OUTPUT_TOKENS = 64
EXIT_BAD_INPUT = 2
EXIT_INCOMPLETE = 1


def add_workload_flags(
    parser: ArgumentParser, *, request_length: int = 512, question_length: int = 0
) -> None:
    """What is sent. ``question_length`` 0: later turns are as long as the first."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--num-clients", type=int, default=256, help="conversations, at most (default: 256)"
    )
    group.add_argument(
        "--request-length",
        type=int,
        default=request_length,
        help=f"tokens of a generated first turn (default: {request_length})",
    )
    group.add_argument(
        "--sub-question-input-length",
        type=int,
        default=question_length,
        help=f"tokens of each generated later turn (default: {question_length}; 0: the same as "
        "--request-length)",
    )
    group.add_argument(
        "--output-length",
        type=int,
        help=f"tokens of each answer (default: {DEFAULT_OUTPUT_TOKENS}, or what the data set says)",
    )
    group.add_argument(
        "--num-rounds",
        type=int,
        help=f"turns of a conversation (default: {DEFAULT_ROUNDS}; at most these of a data set)",
    )
    group.add_argument("--min-rounds", type=int, default=0, help="0: --num-rounds (generated)")
    group.add_argument("--max-rounds", type=int, default=0, help="0: --num-rounds (generated)")
    group.add_argument(
        "--range-ratio",
        type=float,
        default=1.0,
        help="generated lengths vary from this part of the length to all of it (default: 1.0)",
    )
    group.add_argument(
        "--dataset-path",
        default="",
        help="L-Eval rows, a Mooncake trace, ShareGPT conversations or contexts with queries; "
        "told apart by content. Without it, conversations of random token ids",
    )
    group.add_argument(
        "--disable-random-sample",
        action="store_true",
        help="random token ids even where --dataset-path is given (upstream's meaning)",
    )
    group.add_argument(
        "--max-input-length",
        type=int,
        help="no prompt of a data set is longer than so many tokens; cut to fit",
    )
    group.add_argument(
        "--trace-block-tokens",
        type=int,
        default=TRACE_BLOCK_TOKENS,
        help="tokens per hash of a trace; fewer shrink all prompts alike (default: 512)",
    )
    group.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        help="multiplies a trace's arrival times: 0.5 is twice as fast (default: 1.0)",
    )
    group.add_argument("--seed", type=int, default=1, help="of ids, lengths, order and times")


def add_load_flags(parser: ArgumentParser, *, max_parallel: int = 128) -> None:
    """When it is sent."""
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate",
        type=float,
        nargs="+",
        metavar="RATE",
        help="requests per second, on average; several are run one after another; inf: no waiting",
    )
    group.add_argument("--distribution", choices=["poisson", "uniform"], default="poisson")
    group.add_argument(
        "--arrivals",
        choices=["ready-queue", "conversation", "trace"],
        help="ready-queue: a gap after each turn sent; conversation: times for each conversation, "
        "drawn beforehand; trace: the data set's times. Default: trace where there are such "
        "times, else ready-queue",
    )
    group.add_argument(
        "--max-parallel",
        type=int,
        default=max_parallel,
        help=f"requests under way at once, at most (default: {max_parallel})",
    )
    group.add_argument("--ready-queue-policy", choices=["random", "fifo"], default="random")
    group.add_argument(
        "--enable-round-barrier",
        action="store_true",
        help="send no turn before all conversations have been answered the one before",
    )
    group.add_argument(
        "--warm-first-round",
        action="store_true",
        help="send all first turns beforehand and leave them out of the figures",
    )
    group.add_argument(
        "--request-timeout-s",
        type=float,
        default=600.0,
        help="a request without a whole answer after so long has failed (default: 600)",
    )


def build_workload(args: Namespace, model_path: str) -> Workload:
    """Conversations as the flags of `add_workload_flags` ask for. Raises BenchmarkError."""
    ids = usable_ids(read_vocab_size(model_path))
    if not _uses_dataset(args):
        return generate_conversations(_generated_shape(args), ids, args.seed)
    path, limits = Path(args.dataset_path), _limits(args)
    kind = dataset_kind(path)
    if kind is DatasetKind.MOONCAKE:
        return load_mooncake(
            path,
            ids,
            limits,
            args.seed,
            block_tokens=args.trace_block_tokens,
            time_scale=args.time_scale,
        )
    load = {
        DatasetKind.LEVAL: load_leval,
        DatasetKind.SHAREGPT: load_sharegpt,
        DatasetKind.CONTEXTS: load_contexts,
    }[kind]
    return load(path, text_encoder(model_path, ids), limits)


def build_context_workload(args: Namespace, model_path: str, queries: int) -> Workload:
    """Long contexts with one-turn queries; a generated context has ``queries`` of them."""
    ids = usable_ids(read_vocab_size(model_path))
    if not _uses_dataset(args):
        contexts = max(1, args.num_clients // queries)
        return generate_contexts(contexts, queries, _generated_shape(args), ids, args.seed)
    path = Path(args.dataset_path)
    kind = dataset_kind(path)
    if kind not in (DatasetKind.LEVAL, DatasetKind.CONTEXTS):
        raise BenchmarkError(
            f"{path} is a {kind} data set: expected contexts with queries, or L-Eval rows"
        )
    return load_contexts(path, text_encoder(model_path, ids), _limits(args))


def load_settings(args: Namespace, workload: Workload, request_rate: float) -> LoadSettings:
    """How ``workload`` is sent at ``request_rate``. Raises BenchmarkError."""
    return LoadSettings(
        arrivals=_arrivals(args, workload),
        distribution=args.distribution,
        request_rate=request_rate,
        max_parallel=args.max_parallel,
        ready_queue_policy=args.ready_queue_policy,
        round_barrier=args.enable_round_barrier,
        warm_first_round=args.warm_first_round,
        seed=args.seed,
    )


def request_rates(args: Namespace, workload: Workload, default: Sequence[float]) -> Sequence[float]:
    """The rates to run at, one after another: ``default`` where none is given.

    One run, whose rate means nothing, where the data set's times are kept.
    """
    if _arrivals(args, workload) == "trace":
        return (1.0,)
    return tuple(args.request_rate or default)


def settings_note(workload: Workload, settings: LoadSettings) -> dict[str, object]:
    """What a run was measured with, for reports."""
    notes: dict[str, object] = {"workload": workload.name, **workload.notes}
    notes |= {"conversations": len(workload.conversations), "requests": workload.requests}
    return notes | {"workload_digest": workload.digest()} | asdict(settings)


def _arrivals(args: Namespace, workload: Workload) -> Arrivals:
    given: Arrivals | None = args.arrivals
    return given or ("trace" if workload.has_arrivals else "ready-queue")


def _uses_dataset(args: Namespace) -> bool:
    return bool(args.dataset_path) and not args.disable_random_sample


def _limits(args: Namespace) -> Limits:
    return Limits(args.num_clients, args.num_rounds, args.max_input_length, args.output_length)


def _generated_shape(args: Namespace) -> GeneratedShape:
    rounds = args.num_rounds or DEFAULT_ROUNDS
    return GeneratedShape(
        conversations=args.num_clients,
        min_rounds=args.min_rounds or args.max_rounds or rounds,
        max_rounds=args.max_rounds or args.min_rounds or rounds,
        first_input_tokens=args.request_length,
        next_input_tokens=args.sub_question_input_length or args.request_length,
        output_tokens=DEFAULT_OUTPUT_TOKENS if args.output_length is None else args.output_length,
        range_ratio=args.range_ratio,
    )
