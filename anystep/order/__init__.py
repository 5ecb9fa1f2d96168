"""The arithmetic of the order (docs/order.md): permutations, epochs, mixtures, packing.

Numbers only: no files, caches or plans. A change to what a function returns here changes every user's data.
"""
