"""Tests that need a GPU; skipped, and said so, where there is none."""
