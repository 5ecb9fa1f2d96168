"""Conversion of features to and from `tf.train.Example` records and Arrow's columns.

The code works on one record or one batch of records; files of records are in `anystep.containers`.
"""
