"""DeepSpeed's JSON, key by key: the table of its keys, and a file read as findings and fields.

key_rows.py    the form of a row, and the kinds of values
lower.py       keys that become options of ours
table.py       every key, also as a page
findings.py    a file against the table
"""
