"""A pretended accelerator, and tests that run on it, in processes of their own."""
