"""Random programs against data parallel training by hand; ``docs/design/exactness.md`` explains
it.
"""
