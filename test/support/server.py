"""A real SGLang server for a test: started, checked, talked to, and ended without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests

from support.processes import end_tree, free_port

# SGLang serves a float32 model in float16 unless told otherwise, and in float16 the rounding of a
# prefill that was cut elsewhere is enough to flip a greedy choice now and then.
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"),
    *("--dtype", "float32"),
    # An idle scheduler spins otherwise, at the cost of the servers of other tests.
    "--sleep-on-idle",
)
# What starts without a tokenizer and without compiling for minutes; the same prompt has the same
# log-probabilities however its prefix was cut and whoever is in the batch.
GPU_FLAGS = (
    *("--skip-tokenizer-init", "--attention-backend", "triton", "--grammar-backend", "none"),
    *("--cuda-graph-max-bs-decode", "8", "--cuda-graph-backend-prefill=disabled"),
    "--enable-deterministic-inference",
)
LOG_TAIL_LINES = 60
REQUEST_TIMEOUT_S = 120.0


def samples(metrics_text: str) -> dict[str, float]:
    """A ``/metrics`` answer as {sample name with its labels: value}."""
    lines = (line for line in metrics_text.splitlines() if line and not line.startswith("#"))
    parts = (line.rpartition(" ") for line in lines)
    return {name: float(value) for name, _, value in parts}


class ServerFailed(AssertionError):
    """The server ended, or never became ready; the message ends with the tail of its log."""


class Server:
    """``python -m sglang.launch_server`` as a context manager, on the CPU unless told otherwise.

    ``args`` are server flags after the model's path; they win over ``base_flags``.
    ``env`` is added to this process's environment; a value of None removes the variable. The log
    and, unless a flag or ``env`` names another, the SwiftCache runtime directory lie in
    ``tmp_path``. ``start`` returns once ``/health`` answers 200 and raises `ServerFailed` when
    the process ends first or after ``deadline_s``.
    """

    def __init__(
        self,
        model: Path | str,
        *args: str,
        tmp_path: Path,
        env: Mapping[str, str | None] | None = None,
        deadline_s: float = 180.0,
        base_flags: Sequence[str] = CPU_FLAGS,
    ) -> None:
        self.model = Path(model)
        self.args = (*base_flags, *args)
        self.deadline_s = deadline_s
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.runtime_dir = tmp_path / "swiftcache"
        self.log_path = tmp_path / f"server-{self.port}.log"
        self._mark = f"test-{uuid.uuid4().hex}"
        self._env = self._environment(env or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process, wait until it serves, and check that it is this one that answers."""
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        # Shown in /server_info: how a server that is not ours but has our port is told apart.
        command += ["--weight-version", self._mark, *self.args]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        try:
            self._wait_for_health()
            answered = self.server_info().get("weight_version")
            if answered != self._mark:
                raise self._failure(f"another server answers on port {self.port} ({answered!r})")
        except BaseException:
            self.stop()
            raise

    def stop(self, grace_s: float = 0.0) -> None:
        """End the server and everything it started. Harmless when it has ended already.

        With a ``grace_s`` the server gets SIGTERM first; it takes about eight seconds to comply.
        """
        if self._process is not None:
            end_tree(self._process, grace_s)
            self._process = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The launched process (the HTTP server; scheduler and detokenizer are its children)."""
        assert self._process is not None, "the server is not running"
        return self._process

    def log(self) -> str:
        """Everything the server and its children have printed so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    # -- requests -----------------------------------------------------------------------------

    def generate(
        self,
        ids: Sequence[int] | Sequence[Sequence[int]],
        max_new_tokens: int = 16,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        return_logprob: bool = False,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        """Greedy output for one prompt or a batch of them, as a list of response dicts.

        Each has ``output_ids``, ``text`` and ``meta_info`` (with ``cached_tokens`` and, after a
        hit, ``cached_tokens_details``; with ``return_logprob``, ``output_token_logprobs``).
        ``sampling`` overrides temperature 0 and ignore_eos.
        """
        settings = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": max_new_tokens}
        one = isinstance(ids[0], int)
        body = {
            "input_ids": [ids] if one else ids,
            "sampling_params": settings | sampling,
            "return_logprob": return_logprob,
        }
        answer = self._post("/generate", body, timeout_s).json()
        assert isinstance(answer, list), answer
        return answer

    def chat(
        self, messages: list[dict[str, str]], max_tokens: int = 16, **fields: Any
    ) -> dict[str, Any]:
        """One greedy ``/v1/chat/completions`` answer; ``fields`` are added to the request."""
        body = {"model": "default", "messages": messages, "max_tokens": max_tokens}
        answer = self._post("/v1/chat/completions", body | {"temperature": 0.0} | fields)
        result: dict[str, Any] = answer.json()
        return result

    def flush(self, timeout_s: float = 10.0) -> None:
        """Empty the prefix cache; waits up to ``timeout_s`` for running requests to finish."""
        self._post(f"/flush_cache?timeout={timeout_s}", None)

    def pause(self) -> None:
        """The engine stops in the midst of its requests, until it is to go on."""
        self._post("/pause_generation", {"mode": "in_place"})

    def go_on(self) -> None:
        self._post("/continue_generation", {})

    def server_info(self) -> dict[str, Any]:
        result: dict[str, Any] = self._get("/server_info").json()
        return result

    def swiftcache(self) -> dict[str, Any]:
        """The tier's own state: ``/server_info`` -> ``internal_states[0]["swiftcache"]``."""
        state: dict[str, Any] = self.server_info()["internal_states"][0]["swiftcache"]
        return state

    def metrics(self) -> dict[str, float]:
        """``/metrics`` as {sample name with its labels: value}; needs ``--enable-metrics``."""
        return samples(self.metrics_text())

    def metrics_text(self) -> str:
        return self._get("/metrics").text

    def health_generate(self) -> int:
        """Ask ``/health_generate``, which runs a request of SGLang's own; the status code."""
        return requests.get(self.url + "/health_generate", timeout=REQUEST_TIMEOUT_S).status_code

    # -- inside -------------------------------------------------------------------------------

    def _environment(self, extra: Mapping[str, str | None]) -> dict[str, str]:
        ours = {
            "SWIFTCACHE_RUNTIME_DIR": str(self.runtime_dir),
            # A second thread gains a tiny model nothing, and spins against everything else.
            "OMP_NUM_THREADS": "1",
        }
        merged = {**os.environ, **ours, **extra}
        return {name: value for name, value in merged.items() if value is not None}

    def _wait_for_health(self) -> None:
        end = time.monotonic() + self.deadline_s
        while time.monotonic() < end:
            code = self.process.poll()
            if code is not None:
                raise self._failure(f"the server ended with exit code {code} before it was ready")
            try:
                if requests.get(self.url + "/health", timeout=10).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.25)
        raise self._failure(f"the server was not ready after {self.deadline_s:g} s")

    def _get(self, path: str) -> requests.Response:
        return self._checked(requests.get(self.url + path, timeout=REQUEST_TIMEOUT_S))

    def _post(
        self, path: str, body: object, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> requests.Response:
        try:
            answer = requests.post(self.url + path, json=body, timeout=timeout_s)
        except requests.RequestException as error:
            raise self._failure(f"POST {path} got no answer: {error}") from error
        return self._checked(answer)

    def _checked(self, answer: requests.Response) -> requests.Response:
        if not answer.ok:
            raise self._failure(f"{answer.url} answered {answer.status_code}: {answer.text}")
        return answer

    def _failure(self, what: str) -> ServerFailed:
        tail = "\n".join(self.log().splitlines()[-LOG_TAIL_LINES:])
        return ServerFailed(f"{what}\n--- the last lines of {self.log_path} ---\n{tail}")
