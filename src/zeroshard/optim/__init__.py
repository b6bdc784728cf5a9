"""The user's optimizer over sharded state: it stays the user's, re-pointed at the pieces that
this rank owns.
"""
