"""How frameworks plug in; each uses the public API alone."""
