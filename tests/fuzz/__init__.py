"""Random programs against data parallel training by hand; ``docs/design/fuzzing.md`` explains
it.
"""
