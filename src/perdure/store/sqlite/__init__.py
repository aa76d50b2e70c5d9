"""The journal in one SQLite file, or in memory: the dialect, and what a file needs that a server does not."""
