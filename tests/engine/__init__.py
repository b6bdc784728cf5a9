"""Tests of the engine: real ranks, every row of the table it makes sense for."""
