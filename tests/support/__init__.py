"""Test instruments: processes for ranks, hosts that they pretend to live on, links of known
behaviour, storage that fails on demand.
"""
