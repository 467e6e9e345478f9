"""``--swiftcache-layer-stream`` as a user gives it: accepted, or refused in one line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.server_args import ServerArgs, prepare_server_args
from srt.test_flags import command_line, refusal

from swiftcache_tier.errors import SwiftCacheError

DONORS = ("--swiftcache-donors", "host=1MiB")


@pytest.fixture
def runtime_dir(tmp_path: Path) -> Path:
    return tmp_path / "rt"


def with_window(model: Path, runtime_dir: Path, *flags: str) -> list[str]:
    return command_line(model, runtime_dir, *DONORS, "--swiftcache-layer-stream", "4096", *flags)


@pytest.mark.parametrize(("text", "expected"), [("4096", "4096"), ("auto", "auto"), ("off", "off")])
def test_what_may_follow(tiny_model: Path, runtime_dir: Path, text: str, expected: str) -> None:
    flags = (*DONORS, "--swiftcache-layer-stream", text)
    args = prepare_server_args(command_line(tiny_model, runtime_dir, *flags))
    assert args.swiftcache_layer_stream == expected


def test_off_is_the_default_and_leaves_the_page_size_alone(
    tiny_model: Path, runtime_dir: Path
) -> None:
    args = prepare_server_args(command_line(tiny_model, runtime_dir, *DONORS))
    assert args.swiftcache_layer_stream == "off"
    assert args.page_size == 1


def test_pages_are_16_tokens_unless_told(tiny_model: Path, runtime_dir: Path) -> None:
    assert prepare_server_args(with_window(tiny_model, runtime_dir)).page_size == 16
    argv = with_window(tiny_model, runtime_dir, "--page-size", "64")
    assert prepare_server_args(argv).page_size == 64


@pytest.mark.parametrize(("value", "expected"), [("off", "off"), ("auto", "auto"), ("512", "512")])
def test_in_yaml(tiny_model: Path, tmp_path: Path, value: str, expected: str) -> None:
    """Where `off` is a boolean."""
    config = tmp_path / "server.yaml"
    config.write_text(
        f"device: cpu\nattention-backend: torch_native\nswiftcache-donors: [host=1MiB]\n"
        f"swiftcache-layer-stream: {value}\nswiftcache-runtime-dir: {tmp_path / 'rt'}\n"
    )
    args = prepare_server_args(["--model-path", str(tiny_model), "--config", str(config)])
    assert args.swiftcache_layer_stream == expected


def test_as_a_keyword(tiny_model: Path, runtime_dir: Path) -> None:
    args = ServerArgs(
        model_path=str(tiny_model),
        device="cpu",
        attention_backend="torch_native",
        swiftcache_donors=["host=1MiB"],
        swiftcache_runtime_dir=str(runtime_dir),
        swiftcache_layer_stream=4096,
    )
    assert args.swiftcache_layer_stream == "4096"


@pytest.mark.parametrize("value", ["much", "-5", "0", "1.5", "4Ki"])
def test_other_values_are_refused(
    tiny_model: Path, runtime_dir: Path, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = command_line(tiny_model, runtime_dir, *DONORS, f"--swiftcache-layer-stream={value}")
    line = refusal(capsys, argv)
    assert f"--swiftcache-layer-stream {value}: expected off, auto or a number" in line


def test_without_donors_it_is_refused(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model-path", str(tiny_model), "--device", "cpu"]
    line = refusal(capsys, [*argv, "--swiftcache-layer-stream", "auto"])
    assert "no effect without --swiftcache-donors" in line


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--page-size", "1"], "--page-size 1"),
        (["--hicache-write-policy", "write_back"], "write_back"),
        (["--enable-two-batch-overlap"], "--enable-two-batch-overlap"),
        (["--enable-torch-compile"], "--enable-torch-compile"),
        (["--enable-memory-saver"], "--enable-memory-saver"),
        (["--enable-dp-attention"], "--enable-dp-attention"),
        (["--swiftcache-verify"], "--swiftcache-verify"),
        (["--enable-page-major-kv-layout"], "--enable-page-major-kv-layout"),
        (["--tp", "2"], "--tensor-parallel-size"),
        (["--disaggregation-mode", "prefill"], "--disaggregation-mode"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_stand_beside_it_is_named(
    tiny_model: Path,
    runtime_dir: Path,
    flags: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert named in refusal(capsys, with_window(tiny_model, runtime_dir, *flags))


def test_the_hnd_layout_is_refused(
    tiny_model: Path,
    runtime_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    line = refusal(capsys, with_window(tiny_model, runtime_dir))
    assert "SGLANG_USE_HND_KVCACHE" in line


def test_other_attention_backends_are_refused() -> None:
    from sglang.srt.swiftcache.layer_stream import flag_checks

    args = SimpleNamespace(
        swiftcache_layer_stream="auto",
        device="cuda",
        attention_backend="trtllm_mha",
        prefill_attention_backend=None,
        decode_attention_backend=None,
    )
    with pytest.raises(SwiftCacheError, match="--attention-backend trtllm_mha: use triton or"):
        flag_checks.check_after(args)
    args.attention_backend = "fa3"
    flag_checks.check_after(args)
    args.decode_attention_backend = "dual_chunk_flash_attn"
    with pytest.raises(SwiftCacheError, match="--decode-attention-backend dual_chunk"):
        flag_checks.check_after(args)


def test_models_that_share_kv_between_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers import radix_attention

    from sglang.srt.swiftcache.layer_stream.model_layers import check_layers

    class Attention(torch.nn.Module):
        def __init__(self, layer_id: int) -> None:
            super().__init__()
            self.layer_id = layer_id

    monkeypatch.setattr(radix_attention, "RadixAttention", Attention)

    def model(*layers: int) -> Any:
        return torch.nn.ModuleList(Attention(layer) for layer in layers)

    check_layers(model(0, 1, 2), 3)
    for layers in ((0, 1, 1), (0, 2), (0, 1, 2, 3)):
        with pytest.raises(SwiftCacheError, match="one attention layer for each of 0 to 2"):
            check_layers(model(*layers), 3)
