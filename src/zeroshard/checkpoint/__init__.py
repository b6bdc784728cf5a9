"""Checkpoints: reading, writing, importing and exporting."""
