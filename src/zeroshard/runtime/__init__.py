"""The engine: units, hooks, streams."""
