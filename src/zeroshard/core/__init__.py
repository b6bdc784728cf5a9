"""Pure data and arithmetic: no process group, stream, socket or file is touched in this package."""
