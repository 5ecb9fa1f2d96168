"""Examples to the shards of the cache, by way of spills: the three stages of the pipeline.

Where an example goes is `anystep.order`'s; no example is looked into.
"""
