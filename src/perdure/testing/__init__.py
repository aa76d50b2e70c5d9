"""Shipped to users: what holds an implementation to perdure's promises. Of perdure itself only the command line imports it."""
