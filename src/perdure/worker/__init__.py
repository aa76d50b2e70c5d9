"""The asyncio shell around the core: it claims runs, drives them and performs their effects."""
