"""An S3-compatible server in a separate process: moto's, on a free port of 127.0.0.1, with one empty bucket."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from typing import Any, Self

import obstore
from obstore.store import S3Store

_START_S = 60.0
# The port is chosen by the system, so that two test processes never ask for the same one.
_PROGRAM = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class S3Server:
    """Use it as a context manager: at the end its process is gone."""

    bucket = "artifacts"

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        )
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        until_s = time.monotonic() + _START_S
        while True:
            try:
                asked = urllib.request.Request(f"{self.endpoint}/{self.bucket}", method="PUT")
                urllib.request.urlopen(asked, timeout=10).close()
                return self
            except OSError:
                if time.monotonic() > until_s:
                    self.__exit__()
                    raise
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/of perdure"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    def names(self) -> list[str]:
        """The objects in the bucket."""
        return [str(entry["path"]) for page in obstore.list(self._store) for entry in page]

    def read(self, name: str) -> bytes:
        return bytes(obstore.get(self._store, name).bytes())

    def put(self, name: str, data: bytes) -> None:
        obstore.put(self._store, name, data)

    @property
    def _store(self) -> S3Store:
        options: Any = {"endpoint": self.endpoint, "region": "us-east-1", "client_options": {"allow_http": True}}
        return S3Store(self.bucket, access_key_id="test", secret_access_key="test", **options)
