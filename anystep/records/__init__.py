"""Features to and from `tf.train.Example` records and Arrow's columns.

One record or one batch of them at a time; the files that hold records are `anystep.containers`.
"""
