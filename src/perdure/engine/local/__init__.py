"""The local engine: a store and a worker in this process.

The worker claims runs, carries out their steps, and performs effects.
"""
