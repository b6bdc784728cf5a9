"""Modules and their construction."""
