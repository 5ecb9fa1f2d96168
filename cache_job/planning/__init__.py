"""What there is to do: which tasks and splits, what they will take, what is there already.

Nothing is preprocessed here but a few examples, to estimate by.
"""
