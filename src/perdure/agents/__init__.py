"""Agents that are built from parts and not written as a function (ReAct, plans), and the tools of MCP servers."""
