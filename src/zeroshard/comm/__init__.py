"""How bytes travel between ranks: one protocol, one transport per kind of link, payload counted
in one place.
"""
