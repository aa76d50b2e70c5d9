"""Shipped to users: what holds an implementation to perdure's promises. Nothing else in perdure imports it."""
