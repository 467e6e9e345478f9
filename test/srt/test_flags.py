"""The flags as a user gives them: accepted everywhere, or refused in one line with exit code 2."""

from __future__ import annotations

import json
import os
import pickle
import socket
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs, prepare_server_args

from swiftcache_tier.errors import SwiftCacheError


@pytest.fixture
def runtime_dir(tmp_path: Path) -> Path:
    return tmp_path / "rt"


def command_line(model: Path, runtime_dir: Path, *flags: str) -> list[str]:
    return [
        *("--model-path", str(model), "--device", "cpu", "--attention-backend", "torch_native"),
        *("--swiftcache-runtime-dir", str(runtime_dir), *flags),
    ]


def refusal(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """What the user reads; checks that it is one line and that the exit code is 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        prepare_server_args(argv)
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert "usage:" not in printed
    lines = [x for x in printed.splitlines() if x.startswith("swiftcache: ")]
    assert len(lines) == 1, printed
    assert printed.rstrip().endswith(lines[0]), "the reason is not what is read last"
    return lines[0]


# -- accepted ---------------------------------------------------------------------------------


def test_no_spec_means_auto(tiny_model: Path, runtime_dir: Path) -> None:
    args = prepare_server_args(command_line(tiny_model, runtime_dir, "--swiftcache-donors"))
    assert args.swiftcache_donors == []
    assert args.enable_hierarchical_cache
    assert args.radix_cache_backend == "swiftcache"


def test_specs_and_runtime_dir_from_yaml(tiny_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(
        f"model-path: {tiny_model}\ndevice: cpu\nattention-backend: torch_native\n"
        f"swiftcache-donors: [host=64MiB]\nswiftcache-runtime-dir: {tmp_path / 'rt'}\n"
    )
    args = prepare_server_args(["--config", str(config)])
    assert args.swiftcache_donors == ["host=64MiB"]
    assert args.swiftcache_runtime_dir == str(tmp_path / "rt")


@pytest.mark.parametrize(
    ("value", "expected"), [("", []), (" true", []), (" false", None), (" auto", ["auto"])]
)
def test_yaml_can_say_what_the_flag_alone_says(
    tiny_model: Path, tmp_path: Path, value: str, expected: list[str] | None
) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(f"swiftcache-donors:{value}\ndevice: cpu\nattention-backend: torch_native\n")
    args = prepare_server_args(["--model-path", str(tiny_model), "--config", str(config)])
    assert args.swiftcache_donors == expected


@pytest.mark.parametrize("flag", ["layer-stream", "donate"])
def test_a_flag_that_can_be_auto_is_auto_where_nothing_follows(
    tiny_model: Path, tmp_path: Path, runtime_dir: Path, flag: str
) -> None:
    donors = () if flag == "donate" else ("--swiftcache-donors",)
    argv = command_line(tiny_model, runtime_dir, *donors)
    config = tmp_path / "server.yaml"
    config.write_text(f"swiftcache-{flag}:\n")
    field = f"swiftcache_{flag.replace('-', '_')}"
    for how in ((f"--swiftcache-{flag}",), ("--config", str(config))):
        assert getattr(prepare_server_args([*argv, *how]), field) == "auto"


def test_a_relative_runtime_dir_is_made_absolute(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = prepare_server_args(command_line(tiny_model, Path("rel/rt"), "--swiftcache-donors"))
    assert args.swiftcache_runtime_dir == str(tmp_path / "rel" / "rt")


@pytest.mark.parametrize("value", [True, "auto", ["auto"], []])
def test_keyword_arguments_take_what_the_flag_takes(
    tiny_model: Path, runtime_dir: Path, value: object
) -> None:
    args = ServerArgs(
        model_path=str(tiny_model),
        device="cpu",
        attention_backend="torch_native",
        swiftcache_donors=value,
        swiftcache_runtime_dir=str(runtime_dir),
    )
    assert args.swiftcache_donors in ([], ["auto"])
    assert args.radix_cache_backend == "swiftcache"


def test_the_fields_reach_child_processes(tiny_model: Path, runtime_dir: Path) -> None:
    argv = command_line(tiny_model, runtime_dir, "--swiftcache-donors", "host=64MiB")
    copy = pickle.loads(pickle.dumps(prepare_server_args(argv)))
    assert copy.swiftcache_donors == ["host=64MiB"]
    assert copy.swiftcache_runtime_dir == str(runtime_dir)


def test_the_default_runtime_dir_is_written_back(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFTCACHE_RUNTIME_DIR", str(tmp_path / "default"))
    argv = command_line(tiny_model, tmp_path, "--swiftcache-donors")
    at = argv.index("--swiftcache-runtime-dir")
    args = prepare_server_args(argv[:at] + argv[at + 2 :])
    assert args.swiftcache_runtime_dir == str(tmp_path / "default")


def test_write_policy_keeps_its_meaning(tiny_model: Path, runtime_dir: Path) -> None:
    argv = command_line(tiny_model, runtime_dir, "--swiftcache-donors")
    args = prepare_server_args([*argv, "--hicache-write-policy", "write_back"])
    assert args.hicache_write_policy == "write_back"


def test_checking_allocates_and_leaves_nothing(tiny_model: Path, runtime_dir: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    prepare_server_args(command_line(tiny_model, runtime_dir, "--swiftcache-donors", "host=64MiB"))
    assert not runtime_dir.exists() or not list(runtime_dir.iterdir())
    assert len(os.listdir("/proc/self/fd")) == descriptors


# -- refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--disable-radix-cache"], "--disable-radix-cache"),
        (["--radix-cache-backend", "other"], "--radix-cache-backend"),
        (["--hicache-ratio", "3"], "--hicache-ratio"),
        (["--hicache-ratio=2.0"], "--hicache-ratio"),
        (["--hicache-size", "0"], "--hicache-size"),
        (["--hicache-mem-layout", "layer_first"], "--hicache-mem-layout"),
        (["--hicache-io-backend", "direct"], "--hicache-io-backend"),
        (["--hicache-storage-backend", "file"], "--hicache-storage-backend"),
        (["--tp-size", "2"], "--tensor-parallel-size"),
        (["--pp-size", "2"], "--pipeline-parallel-size"),
        (["--dp-size", "2"], "--data-parallel-size"),
        (["--enable-lmcache"], "--enable-lmcache"),
        (["--kv-cache-dtype", "fp4_e2m1"], "--kv-cache-dtype"),
        (["--disaggregation-mode", "prefill"], "--disaggregation-mode"),
        (["--enable-streaming-session"], "--enable-streaming-session"),
        (["--hicache-rat", "2.0"], "--hicache-ratio"),
        (["--dcp-size", "2"], "--dcp-size"),
        (["--speculative-algorithm", "EAGLE"], "--speculative-algorithm"),
        (["--enable-flexkv"], "--enable-flexkv"),
        (["--enable-hisparse"], "--enable-hisparse"),
        (["--enable-page-major-kv-layout"], "--enable-page-major-kv-layout"),
        (["--enable-unified-memory"], "--enable-unified-memory"),
        (["--dllm-algorithm", "LowConfidence"], "--dllm-algorithm"),
        (["--page-size", "3"], "--page-size"),
        (["--page-size", "0"], "--page-size"),
        (["--device", "xpu"], "--device"),
    ],
)
def test_flags_that_cannot_stand_beside_donors(
    tiny_model: Path,
    runtime_dir: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    expected: str,
) -> None:
    argv = command_line(tiny_model, runtime_dir, "--swiftcache-donors", "host=64MiB")
    assert expected in refusal(capsys, argv + flags)


def test_a_host_tier_flag_in_yaml_is_refused(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("hicache-ratio: 2.0\n")
    argv = command_line(tiny_model, tmp_path / "rt", "--swiftcache-donors")
    assert "--hicache-ratio" in refusal(capsys, [*argv, "--config", str(config)])


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("gpu:1=4GiB", "host="),
        ("host", "host="),
        ("host=-1GiB", "host="),
        ("host=900TiB", "available"),
        ("cuda:0=1GiB", "cuda:0"),
        ("ipc:///nowhere/at-all", "/nowhere/at-all"),
    ],
)
def test_specs_that_cannot_work(
    tiny_model: Path,
    runtime_dir: Path,
    capsys: pytest.CaptureFixture[str],
    spec: str,
    expected: str,
) -> None:
    line = refusal(capsys, command_line(tiny_model, runtime_dir, "--swiftcache-donors", spec))
    assert spec in line
    assert expected in line


def test_a_socket_that_is_no_donor(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        spec = f"ipc://{path}"
        line = refusal(capsys, command_line(tiny_model, tmp_path, "--swiftcache-donors", spec))
    assert spec in line


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory to another user")
def test_a_runtime_dir_of_another_user(
    tiny_model: Path, runtime_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime_dir.mkdir(mode=0o700)
    os.chown(runtime_dir, 65534, 65534)
    line = refusal(capsys, command_line(tiny_model, runtime_dir, "--swiftcache-donors"))
    assert str(runtime_dir) in line


def test_an_empty_runtime_dir_is_not_the_current_folder(
    tiny_model: Path, runtime_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = command_line(tiny_model, runtime_dir, "--swiftcache-donors")
    argv[argv.index("--swiftcache-runtime-dir") + 1] = ""
    line = refusal(capsys, argv)
    assert "--swiftcache-runtime-dir is empty: expected a folder" in line


def test_a_runtime_dir_without_donors_has_no_effect_and_says_so(
    tiny_model: Path, runtime_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, command_line(tiny_model, runtime_dir))
    assert "--swiftcache-runtime-dir" in line
    assert "--swiftcache-donors" in line


def test_verify_is_off_unless_asked_for(tiny_model: Path, runtime_dir: Path) -> None:
    argv = command_line(tiny_model, runtime_dir, "--swiftcache-donors", "host=64MiB")
    assert prepare_server_args(argv).swiftcache_verify is False
    assert prepare_server_args([*argv, "--swiftcache-verify"]).swiftcache_verify is True


def test_copies_are_off_unless_asked_for(tiny_model: Path, runtime_dir: Path) -> None:
    argv = command_line(tiny_model, runtime_dir, "--swiftcache-donors")
    assert prepare_server_args(argv).swiftcache_replicas == 1
    assert prepare_server_args([*argv, "--swiftcache-replicas", "3"]).swiftcache_replicas == 3


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--swiftcache-donors", "--swiftcache-replicas", "0"], "expected 1"),
        (["--swiftcache-donors", "--swiftcache-replicas", "9"], "to 8"),
        (
            ["--swiftcache-donors", "host=64MiB", "--swiftcache-replicas", "2"],
            "name at least 2 donors",
        ),
        (["--swiftcache-replicas", "2"], "no effect without --swiftcache-donors"),
    ],
)
def test_copies_that_cannot_be(
    tiny_model: Path,
    runtime_dir: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    expected: str,
) -> None:
    assert expected in refusal(capsys, command_line(tiny_model, runtime_dir, *flags))


@pytest.mark.parametrize(
    ("flag", "values", "expected"),
    [
        ("replicas", ["x", "1.5", "0"], "expected 1 (no copies) to 8"),
        ("ttl", ["abc", "-1", "inf"], "expected seconds over 0"),
        ("io-backend", ["direct", ""], "expected auto, kernel or copy"),
    ],
)
def test_values_that_are_none_are_one_line_and_no_usage(
    tiny_model: Path,
    runtime_dir: Path,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    values: list[str],
    expected: str,
) -> None:
    argv = command_line(tiny_model, runtime_dir, "--swiftcache-donors")
    for value in values:
        line = refusal(capsys, [*argv, f"--swiftcache-{flag}={value}"])
        assert f"--swiftcache-{flag} {value}: {expected}" in line


@pytest.mark.parametrize(
    "flag", ["runtime-dir", "io-backend", "replicas", "ttl", "low-water", "high-water"]
)
def test_a_value_that_is_missing_is_one_line_and_no_usage(
    tiny_model: Path, runtime_dir: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    argv = command_line(tiny_model, runtime_dir, "--swiftcache-donors")
    for rest in ((), ("--log-level", "info")):
        line = refusal(capsys, [*argv, f"--swiftcache-{flag}", *rest])
        assert f"--swiftcache-{flag} has no value" in line


def test_keyword_arguments_are_read_as_the_flags_are(tiny_model: Path, runtime_dir: Path) -> None:
    def server_args(**fields: object) -> ServerArgs:
        return ServerArgs(
            model_path=str(tiny_model),
            device="cpu",
            attention_backend="torch_native",
            swiftcache_donors=[],
            swiftcache_runtime_dir=str(runtime_dir),
            **fields,
        )

    args = server_args(swiftcache_ttl="60", swiftcache_replicas="2")
    assert (args.swiftcache_ttl, args.swiftcache_replicas) == (60.0, 2)
    for field, value in (
        ("swiftcache_ttl", "abc"),
        ("swiftcache_ttl", True),
        ("swiftcache_replicas", 1.5),
        ("swiftcache_io_backend", "direct"),
    ):
        with pytest.raises(SwiftCacheError, match=f"{value}: expected"):
            server_args(**{field: value})


def test_verify_without_donors_has_no_effect_and_says_so(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model-path", str(tiny_model), "--device", "cpu", "--swiftcache-verify"]
    line = refusal(capsys, argv)
    assert "--swiftcache-verify" in line
    assert "--swiftcache-donors" in line


def test_engine_raises_instead_of_ending_the_program(tiny_model: Path, runtime_dir: Path) -> None:
    with pytest.raises(SwiftCacheError, match="nonsense"):
        ServerArgs(
            model_path=str(tiny_model),
            device="cpu",
            swiftcache_donors=["nonsense"],
            swiftcache_runtime_dir=str(runtime_dir),
        )


def write_config(tmp_path: Path, **fields: object) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    common = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(common | fields))
    return folder


MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 2,
    "first_k_dense_replace": 2,
}
SWA = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 16,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
MAMBA = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "head_dim": 16,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
}


@pytest.mark.parametrize(("fields", "named"), [(MLA, "MLA"), (SWA, "SWA"), (MAMBA, "Mamba")])
def test_model_families_that_are_not_covered(
    tmp_path: Path,
    runtime_dir: Path,
    capsys: pytest.CaptureFixture[str],
    fields: dict[str, object],
    named: str,
) -> None:
    model = write_config(tmp_path, **fields)
    line = refusal(capsys, command_line(model, runtime_dir, "--swiftcache-donors"))
    assert named in line
    assert str(fields["architectures"][0]) in line
