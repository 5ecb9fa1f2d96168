"""Arrays of checkpoints on disk, read and written in blocks, and views of them.

A model may be larger than memory, and one stacked kernel too. Names of leaves, and the programs that wrote
them, belong in `anystep.train.conversion`.
"""
