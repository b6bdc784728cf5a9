"""What commands are made of: options as data (declared.py), and what they print (console.py)."""
