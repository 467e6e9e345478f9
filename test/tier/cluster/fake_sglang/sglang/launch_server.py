"""A process with a server's command line, that a test tells how to misbehave.

It writes what it was started with, its own process ids and how it ended to the file $RECORD.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import time

SLEEPER = [sys.executable, "-c", "import time; time.sleep(3600)"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--fake-exit", action="store_true", help="end before serving")
    parser.add_argument("--fake-silent", action="store_true", help="never serve")
    parser.add_argument("--fake-stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--fake-end-when", help="end by itself once this file is there")
    args, _ = parser.parse_known_args()
    child = subprocess.Popen(SLEEPER)
    record = {"argv": sys.argv[1:], "pids": [os.getpid(), child.pid], "time": time.monotonic()}
    record["runtime_dir"] = os.environ["SWIFTCACHE_RUNTIME_DIR"]
    record["greeting"] = os.environ.get("GREETING")
    with open(os.path.join(os.environ["RECORDS"], f"{args.port}.json"), "w") as file:
        json.dump(record, file)
    print(f"loading {args.model_path}")
    print("50%\r100%\nW" + "o" * 100_000, file=sys.stderr)
    if args.fake_exit:
        print("ValueError: no such model")
        sys.exit(3)
    if args.fake_stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.fake_silent:
        time.sleep(3600)
    server = http.server.HTTPServer((args.host, args.port), Handler)
    server.timeout = 0.1
    print("serving")
    while not (args.fake_end_when and os.path.exists(args.fake_end_when)):
        server.handle_request()
    sys.exit("RuntimeError: it broke")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    main()
