"""Examples in memory: features, ragged batches, packed rows, and what makes a model's features of them.

No serialized form, which is `anystep.records`, and no order.
"""
