"""The tools of MCP servers, as durable tools. The MCP SDK is imported on first use, not together with perdure."""
