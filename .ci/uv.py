"""Run the uv of this checkout with the package index that pip is configured to use.

uv reads neither pip.conf nor PIP_*, and a machine behind a mirror or a proxy often has only those. This program passes them to uv in
its environment and writes them to no file, so that no registry and no credential ends up in the repository.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

BOOT = Path(__file__).resolve().parent.parent / ".boot"


def pip_settings() -> dict[str, str]:
    """The settings of pip from its files and its environment, which overrides the files; empty if there is no pip."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False).stdout
    found: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(section):
                found[key.removeprefix(section)] = " ".join(ast.literal_eval(value).split())
    return found


def uv_environment(pip: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """The environment for uv: pip's settings as uv's variables; variables that are already set for uv win."""
    words = {
        "UV_DEFAULT_INDEX": "" if "UV_INDEX_URL" in env else pip.get("index-url", ""),
        "UV_INDEX": "" if "UV_EXTRA_INDEX_URL" in env else pip.get("extra-index-url", ""),
        "UV_FIND_LINKS": pip.get("find-links", "").replace(" ", ","),
        "UV_INSECURE_HOST": pip.get("trusted-host", ""),
        "SSL_CERT_FILE": pip.get("cert", ""),
        "HTTPS_PROXY": "" if "https_proxy" in env else pip.get("proxy", ""),
        # pip takes the best version of all indexes; uv would stop at the first index that has the name. Hashes keep this safe.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_CACHE_DIR": "" if _home_cache_is_writable(env) else str(BOOT / "cache"),
    }
    return {name: value for name, value in words.items() if value} | dict(env)


def _home_cache_is_writable(env: Mapping[str, str]) -> bool:
    cache = Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME", "/nonexistent")) / ".cache") / "uv"
    nearest = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return os.access(nearest, os.W_OK)


if __name__ == "__main__":
    uv = str(BOOT / "bin" / "uv")
    os.execve(uv, [uv, *sys.argv[1:]], uv_environment(pip_settings(), os.environ))
