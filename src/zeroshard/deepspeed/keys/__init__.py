"""DeepSpeed's JSON, key by key: the table of its keys, and a file read as findings and fields.

lower.py       keys that become options of ours
table.py       every key, a row each, also as a page
findings.py    a file against the table
"""
