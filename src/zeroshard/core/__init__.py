"""Pure data and arithmetic: no process group, stream or file is touched below this package."""
