"""Checks that the driver is installed: the only module of this package that can be imported without psycopg."""

from __future__ import annotations

from perdure.errors import InvalidInput


def require_psycopg() -> None:
    """Raise InvalidInput unless psycopg and its libpq can be imported."""
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise InvalidInput(
            f"a postgresql:// URL needs psycopg, which cannot be loaded here ({' '.join(str(error).split())[:120]}): "
            "pip install 'perdure[postgres]', or from a checkout pip install '/path/to/checkout[postgres]'"
        ) from None
