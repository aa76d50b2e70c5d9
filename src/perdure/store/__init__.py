"""Stores: the databases of journals.

All SQL of perdure is in this package; other code uses the Store protocol in api.py.
"""
