"""``--swiftcache-donate`` as a user gives it: set up, or refused with what stands against it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.server_args import prepare_server_args

from sglang.srt.swiftcache import donate_checks
from swiftcache_tier.errors import SwiftCacheError


@pytest.fixture(autouse=True)
def runtime_dir_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of the user's own are none of these tests' business, nor what they left."""
    monkeypatch.setenv("SWIFTCACHE_RUNTIME_DIR", str(tmp_path / "rt"))


def arguments(model: Path, *flags: str) -> list[str]:
    return ["--model-path", str(model), "--device", "cpu", *flags]


def refusal(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        prepare_server_args(argv)
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert "usage:" not in printed
    (line,) = [x for x in printed.splitlines() if x.startswith("swiftcache: ")]
    return line


def test_it_lays_the_pool_out_by_pages_and_chooses_what_can_read_it(tiny_model: Path) -> None:
    args = prepare_server_args(arguments(tiny_model, "--swiftcache-donate", "auto"))
    assert args.enable_page_major_kv_layout
    assert args.page_size == 16
    assert args.attention_backend == "torch_native"
    assert args.swiftcache_runtime_dir
    assert not args.enable_hierarchical_cache, "lending needs no second tier"
    marks = donate_checks.water_marks(args)
    assert (marks.low, marks.high, marks.most) == (0.2, 0.3, 1.0)


def test_fraction_and_marks(tiny_model: Path) -> None:
    flags = ("--swiftcache-donate", "0.5", "--swiftcache-low-water", "0.1")
    args = prepare_server_args(
        arguments(tiny_model, *flags, "--swiftcache-high-water", "0.2", "--page-size", "64")
    )
    marks = donate_checks.water_marks(args)
    assert (marks.low, marks.high, marks.most) == (0.1, 0.2, 0.5)
    assert args.page_size == 64


def test_both_roles_at_once(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--swiftcache-donate", "auto", "--swiftcache-donors", "host=64MiB")
    args = prepare_server_args(
        arguments(tiny_model, *flags, "--swiftcache-runtime-dir", str(tmp_path / "rt"))
    )
    assert args.enable_page_major_kv_layout
    assert args.radix_cache_backend == "swiftcache"
    paths = donate_checks.own_donor(args)
    assert paths is not None
    assert paths.name == f"engine-{args.port}"


def test_off_is_stock(tiny_model: Path) -> None:
    args = prepare_server_args(
        arguments(tiny_model, "--attention-backend", "torch_native", "--swiftcache-donate", "off")
    )
    assert not args.enable_page_major_kv_layout
    assert args.swiftcache_runtime_dir is None
    assert donate_checks.own_donor(args) is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--swiftcache-donate", "some"), "expected off, auto, or the fraction"),
        (("--swiftcache-donate", "1.5"), "over 0 and at most 1"),
        (("--swiftcache-donate", "auto", "--swiftcache-low-water", "x"), "x: expected a fraction"),
        (("--swiftcache-high-water", "much"), "much: expected a fraction"),
        (("--swiftcache-low-water", "0.1"), "no effect without --swiftcache-donate"),
        (
            ("--swiftcache-donate", "auto", "--swiftcache-low-water", "0.5"),
            "the low one under the high one",
        ),
        (
            ("--swiftcache-donate", "auto", "--attention-backend", "triton"),
            "attention backend triton cannot read: use --attention-backend torch_native",
        ),
        (("--swiftcache-donate", "auto", "--page-size", "1"), "whole pages of many tokens"),
        (("--swiftcache-donate", "auto", "--page-size", "24"), "power of two"),
        (("--swiftcache-donate", "auto", "--page-size", "0"), "power of two"),
        (("--swiftcache-donate", "auto", "--radix-cache-backend", "other"), "radix cache alone"),
        (("--swiftcache-donate", "auto", "--hicache-storage-backend", "file"), "storage tiers"),
        (("--swiftcache-donate", "auto", "--swiftcache-runtime-dir", "/tmp"), "by others"),
        (
            ("--swiftcache-donate", "auto", "--swiftcache-high-water", "1"),
            "nothing is left to lend",
        ),
        (
            ("--swiftcache-donate", "auto", "--enable-pdmux"),
            "no step at which memory could be lent",
        ),
        (("--swiftcache-donate", "auto", "--tp", "2"), "ranks do not agree"),
        (("--swiftcache-donate", "auto", "--disable-radix-cache"), "prefix cache"),
        (("--swiftcache-donate", "auto", "--enable-hierarchical-cache"), "--swiftcache-donors"),
        (("--swiftcache-donate", "auto", "--kv-cache-dtype", "fp4_e2m1"), "packed KV formats"),
        (
            ("--swiftcache-donate", "auto", "--swiftcache-donors", "--swiftcache-verify"),
            "layer by layer",
        ),
    ],
)
def test_what_cannot_be_is_one_line(
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    words: str,
) -> None:
    assert words in refusal(capsys, arguments(tiny_model, *flags))


@pytest.mark.parametrize(
    ("name", "value"),
    [("SWIFTCACHE_HEARTBEAT_S", "abc"), ("SWIFTCACHE_LOG_FORMAT", "xml"), ("SWIFTCACHE_FOO", "1")],
)
def test_settings_are_read_before_anything_is_loaded(
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    monkeypatch.setenv(name, value)
    assert name in refusal(capsys, arguments(tiny_model, "--swiftcache-donate", "auto"))


def test_a_layer_stream_cannot_be_lent_from() -> None:
    flags: dict[str, Any] = {"swiftcache_layer_stream": "4096"}
    (conflict,) = [c for c in donate_checks._CONFLICTS if c.flag == "--swiftcache-layer-stream"]
    assert conflict.present(SimpleNamespace(**flags))
    assert not conflict.present(SimpleNamespace(swiftcache_layer_stream="off"))
    assert "aliases memory layer by layer" in conflict.advice


def with_backends(*backends: str | None) -> Any:
    return SimpleNamespace(device="cuda", _resolved_attention_backends=lambda: backends)


def test_a_gpu_backend_that_reads_other_layouts_is_refused_by_name() -> None:
    words = "flashinfer cannot read: use --attention-backend triton or fa3"
    with pytest.raises(SwiftCacheError, match=words):
        donate_checks.turn_page_major_on(with_backends("flashinfer", "triton"))


@pytest.mark.parametrize(
    ("backends", "sglang_checks"),
    [(("triton", "triton"), True), (("fa3", "fa3"), False), (("triton", "fa3"), False)],
)
def test_triton_and_fa3_read_pages_on_a_gpu(backends: tuple[str, str], sglang_checks: bool) -> None:
    args = with_backends(*backends)
    assert donate_checks.turn_page_major_on(args) is sglang_checks
    assert args.enable_page_major_kv_layout


@pytest.mark.parametrize(("hopper", "backend"), [(True, "fa3"), (False, "triton")])
def test_a_lending_server_keeps_sglangs_default_on_hopper(
    monkeypatch: pytest.MonkeyPatch, hopper: bool, backend: str
) -> None:
    monkeypatch.setattr("sglang.srt.utils.is_hopper_with_cuda_12_3", lambda: hopper)
    assert donate_checks._default_backend("cuda") == backend
    assert donate_checks._default_backend("cpu") == "torch_native"


def test_models_without_plain_kv_are_refused_by_name() -> None:
    from sglang.srt.configs.model_config import AttentionArch

    from sglang.srt.swiftcache.model_check import check_model

    config = SimpleNamespace(
        attention_arch=AttentionArch.MLA,
        is_hybrid_swa=False,
        hf_config=SimpleNamespace(architectures=["DeepseekV3ForCausalLM"]),
    )
    with pytest.raises(SwiftCacheError, match=r"--swiftcache-donate does not cover latent"):
        check_model(config, "--swiftcache-donate")
    config.attention_arch, config.is_hybrid_swa = AttentionArch.MHA, True
    with pytest.raises(SwiftCacheError, match="sliding-window"):
        check_model(config, "--swiftcache-donate")
