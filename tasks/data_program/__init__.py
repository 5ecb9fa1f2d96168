"""`anystep-data`: what the data of any step is, from a cache, a plan or a model directory.

Arguments and output; the answers come from `anystep.inspection` and `anystep.plans`.
"""
