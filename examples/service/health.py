"""Is this container well? Exit code 0 or 1, for HEALTHCHECK and for Kubernetes.

    python health.py web             the web process answers, and the database answers it
    python health.py worker          a worker on this host is registered and has renewed its lease
    python health.py worker --live   the same, but a database that does not answer is no reason to restart the worker

The worker registers itself as HOST:PID. In a container the host's name belongs to that container alone.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 8  # below the time-outs of the probes


def web() -> str | None:
    """What is wrong with the web process; None if nothing is."""
    url = f"http://127.0.0.1:{os.environ.get('PORT', '8000')}/health/ready"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S):
            return None
    except (urllib.error.URLError, OSError) as error:
        return f"{url}: {error}"


def worker(live: bool) -> str | None:
    """What is wrong with the worker of this host; None if nothing is."""
    command = [sys.executable, "-m", "perdure", "list", "--workers", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(command, 1, "", f"no answer after {TIMEOUT_S} s")
    if done.returncode != 0:
        # Perhaps the database is down. Workers wait for it: killing all of them would make an outage longer.
        return None if live else done.stderr.strip()
    here = f"{socket.gethostname()}:"
    found = [one for one in map(json.loads, done.stdout.splitlines()) if one["kind"] == "worker" and one["name"].startswith(here)]
    return None if any(one["alive"] for one in found) else f"no live worker is registered for {here}"


def main(words: list[str]) -> int:
    match words:
        case ["web"]:
            wrong = web()
        case ["worker"]:
            wrong = worker(live=False)
        case ["worker", "--live"]:
            wrong = worker(live=True)
        case _:
            wrong = "usage: health.py web | health.py worker [--live]"
    if wrong is not None:
        print(wrong, file=sys.stderr)
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
