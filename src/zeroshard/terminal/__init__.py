"""The parts of commands: options as data (declared.py), and what is printed (console.py)."""
