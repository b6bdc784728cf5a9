"""Adapters of frameworks; each uses the public API alone."""
