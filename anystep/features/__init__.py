"""Examples in memory: features, ragged batches, packed rows, and converters to a model's features.

Serialized examples are in `anystep.records`; the order of examples is in `anystep.order`.
"""
