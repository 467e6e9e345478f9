"""What a running SGLang server says of itself, and emptying its cache."""

from __future__ import annotations

from typing import Any

import requests

from swiftcache_bench.errors import BenchmarkError

ANSWER_TIMEOUT_S = 30.0
FLUSH_TIMEOUT_S = 60.0


def server_info(url: str) -> dict[str, Any]:
    """``/server_info``: flags as the server resolved them, pool sizes, internal states."""
    return _json(_request("GET", f"{url}/server_info", ANSWER_TIMEOUT_S))


def served_model_path(url: str) -> str:
    """The model that the server was started with."""
    return str(_json(_request("GET", f"{url}/model_info", ANSWER_TIMEOUT_S))["model_path"])


def flush_cache(url: str) -> None:
    """Empty the prefix cache, once running requests have ended. Raises BenchmarkError."""
    _request("POST", f"{url}/flush_cache?timeout={FLUSH_TIMEOUT_S:g}", FLUSH_TIMEOUT_S + 10)


def is_healthy(url: str, timeout_s: float) -> bool:
    """Whether ``/health`` answers 200 within ``timeout_s``."""
    try:
        return requests.get(f"{url}/health", timeout=timeout_s).status_code == 200
    except requests.RequestException:
        return False


def _request(method: str, url: str, timeout_s: float) -> requests.Response:
    try:
        response = requests.request(method, url, timeout=timeout_s)
    except requests.RequestException as error:
        raise BenchmarkError(
            f"no answer from {url} ({type(error).__name__}): is a server up there? See --host "
            "and --port"
        ) from None
    if not response.ok:
        text = " ".join(response.text.split())[:200]
        raise BenchmarkError(f"{url} answered {response.status_code}, expected 200: {text}")
    return response


def _json(response: requests.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except requests.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        raise BenchmarkError(f"{response.url} did not answer with a JSON object: is it SGLang?")
    return answer
