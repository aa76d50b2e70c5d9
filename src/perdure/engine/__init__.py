"""Engines, which start and drive runs.

The interface is in api.py, the local engine in local/, the choice by URL in open.py. Notices for people are in
notify/, the engine's time and ids in clock.py, its threads in threads.py.
"""
