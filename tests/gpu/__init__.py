"""Tests of an accelerator: CUDA, or where there is none the pretended one of tests/device."""
