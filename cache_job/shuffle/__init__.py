"""The three stages of the pipeline: source ranges to spills, spills sorted by shard, shards of the cache.

`anystep.order` decides each example's place; no example is parsed here.
"""
