"""ReAct: a model, its tools, and the loop between them, as an agent."""
