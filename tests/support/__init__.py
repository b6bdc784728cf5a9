"""Test instruments: processes for ranks, links of known behaviour, storage that fails on demand."""
