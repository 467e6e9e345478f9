"""Contenders: the built-in ones, those of a file and of the command line, and bad ones refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.server.contenders import (
    ContenderEntry,
    built_in_entries,
    parse_contender,
    read_contender_file,
    resolve_contenders,
    split_flags,
)
from swiftcache_bench.server.identity import check_flags

DONORS = ["host=6GB", "cuda:1=4GB"]


def test_the_built_in_contenders_suit_the_device() -> None:
    on_gpu = resolve_contenders(built_in_entries("cuda"), DONORS, [])
    names = [contender.name for contender in on_gpu]
    assert names[0] == "stock"
    assert names[-1] == "swiftcache"
    assert len(names) == 5
    on_cpu = resolve_contenders(built_in_entries("cpu"), ["host=1MiB"], [])
    assert [contender.name for contender in on_cpu] == ["stock", "swiftcache"]


def test_hicache_gets_as_much_memory_as_the_donors_have() -> None:
    entries = built_in_entries("cuda")
    for contender in resolve_contenders(entries, DONORS, [])[1:4]:
        flags = contender.flags(Path("/run"))
        size = int(flags[flags.index("--hicache-size") + 1]) * 10**9
        donated = sum(donor.size_bytes or 0 for donor in contender.donors)
        assert donated - 10**9 < size <= donated


def test_only_contenders_that_name_the_directory_get_donors(tmp_path: Path) -> None:
    stock, *_, swiftcache = resolve_contenders(built_in_entries("cuda"), DONORS, [])
    assert not stock.uses_donors
    assert swiftcache.uses_donors
    assert [str(donor.device) for donor in swiftcache.donors] == ["host", "cuda:1"]
    assert str(tmp_path) in swiftcache.flags(tmp_path)


def test_a_size_below_the_unit_is_refused() -> None:
    entries = {"x": ContenderEntry("--hicache-size {tier_gb}")}
    (contender,) = resolve_contenders(entries, ["host=9MiB"], [])
    with pytest.raises(BenchmarkError, match="less than 1 GB"):
        contender.flags(Path("/run"))


def test_a_file_adds_contenders_and_replaces_built_in_ones(tmp_path: Path) -> None:
    path = tmp_path / "contenders.yaml"
    path.write_text(
        """
server_args: --page-size 16
baseline: mine
donors: [host=1GiB]
contenders:
  mine:
    args: --swiftcache-donors auto --swiftcache-runtime-dir {runtime_dir}
    donors: [host=2GiB, cuda:1=1GiB]
    env: {SWIFTCACHE_HEARTBEAT_S: "2"}
  stock: {args: --disable-radix-cache}
"""
    )
    file = read_contender_file(path)
    assert (file.server_args, file.baseline) == ("--page-size 16", "mine")
    entries = built_in_entries("cuda") | file.contenders
    mine, stock = resolve_contenders(entries, file.donors or [], ["mine", "stock"])
    assert len(mine.donors) == 2
    assert mine.env == {"SWIFTCACHE_HEARTBEAT_S": "2"}
    assert stock.args == ("--disable-radix-cache",)


@pytest.mark.parametrize(
    "text",
    [
        "contenders: [a]",
        "contender: {}",
        "contenders: {a: {flags: x}}",
        "contenders: {a: {args: 3}}",
        "{",
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "contenders.yaml"
    path.write_text(text)
    with pytest.raises(BenchmarkError, match=r"contenders\.yaml") as caught:
        read_contender_file(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="--config"):
        read_contender_file(tmp_path / "nowhere.yaml")


def test_a_contender_of_the_command_line_may_have_equals_signs_in_its_flags() -> None:
    name, entry = parse_contender("mine=--page-size=16 --swiftcache-donors host=1GiB")
    assert name == "mine"
    (contender,) = resolve_contenders({name: entry}, [], [])
    assert contender.args == ("--page-size=16", "--swiftcache-donors", "host=1GiB")
    assert not contender.uses_donors


@pytest.mark.parametrize("text", ["mine", "=--flag", ""])
def test_a_contender_without_a_name_or_flags_is_refused(text: str) -> None:
    with pytest.raises(BenchmarkError, match="NAME"):
        parse_contender(text)


def test_unknown_names_and_donors_are_refused() -> None:
    entries = built_in_entries("cuda")
    with pytest.raises(BenchmarkError, match=r"nobody.*stock"):
        resolve_contenders(entries, DONORS, ["nobody"])
    for donor in ("auto", "ipc:///tmp/x", "tape=1GiB"):
        with pytest.raises(BenchmarkError, match=donor.partition("=")[0]):
            resolve_contenders(entries, [donor], [])
    with pytest.raises(BenchmarkError, match="--server-args"):
        split_flags("--flag 'open", "--server-args")


# -- whether a server runs what was asked -----------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "info"),
    [
        (["--enable-hierarchical-cache"], {"enable_hierarchical_cache": True}),
        (["--hicache-io-backend", "direct"], {"hicache_io_backend": "direct"}),
        (["--hicache-size=40"], {"hicache_size": 40}),
        (["--hicache-ratio", "2"], {"hicache_ratio": 2.0}),
        (["--swiftcache-donors"], {"swiftcache_donors": ["auto"]}),
        (["--swiftcache-donors", "host=1", "auto"], {"swiftcache_donors": ["host=1", "auto"]}),
        (["--page-size", "1", "--page-size", "16"], {"page_size": 16}),
        (["--flag", "true"], {"flag": True}),
        (["--settings", '{"a": 1}'], {"settings": {"a": 1}}),
    ],
)
def test_flags_that_run_are_confirmed(flags: list[str], info: dict[str, object]) -> None:
    check = check_flags(flags, info)
    assert len(check.confirmed) == 1
    assert not check.differing
    assert not check.unlisted


@pytest.mark.parametrize(
    ("flags", "info"),
    [
        (["--enable-hierarchical-cache"], {"enable_hierarchical_cache": False}),
        (["--hicache-io-backend", "kernel"], {"hicache_io_backend": "direct"}),
        (["--hicache-size", "40"], {"hicache_size": 4}),
        (["--hicache-size", "many"], {"hicache_size": 4}),
        (["--swiftcache-donors", "host=1"], {"swiftcache_donors": ["auto"]}),
        (["--swiftcache-donors", "host=1"], {"swiftcache_donors": None}),
        (["--page-size", "16"], {"page_size": None}),
        (["--settings", '{"a": 1}'], {"settings": {"a": 2}}),
        (["--name", "a", "b"], {"name": "a"}),
    ],
)
def test_flags_that_do_not_run_are_named_with_what_does(
    flags: list[str], info: dict[str, object]
) -> None:
    check = check_flags(flags, info)
    ((flag, _, runs),) = check.differing
    assert flag == flags[0]
    assert runs == str(next(iter(info.values())))


def test_flags_that_a_server_does_not_list_are_neither() -> None:
    check = check_flags(["--tp", "2"], {"tp_size": 2})
    assert check.unlisted == ("--tp",)
    assert not check.differing
