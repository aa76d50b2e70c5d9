"""What moves runs: the seam (api.py), the engine over a store and a worker in this process (local.py), and which one a URL names (open.py)."""
