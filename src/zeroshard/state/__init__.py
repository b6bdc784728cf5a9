"""Numbers at rest: what a rank keeps of a weight, a master, a moment or a gradient, on whatever
tier.
"""
