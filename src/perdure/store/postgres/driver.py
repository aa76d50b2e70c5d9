"""Whether there is a driver at all: the one module of this package that can be imported without it."""

from __future__ import annotations

from perdure.errors import InvalidInput


def require_psycopg() -> None:
    """InvalidInput unless psycopg, with the library that it needs, is installed."""
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise InvalidInput(
            f"a postgresql:// URL needs psycopg, which cannot be loaded here ({' '.join(str(error).split())[:120]}): "
            "pip install 'perdure[postgres]', or from a checkout pip install '/path/to/checkout[postgres]'"
        ) from None
