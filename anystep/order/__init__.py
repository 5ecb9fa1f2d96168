"""The arithmetic of the order (docs/order.md): permutations, epochs, mixtures, packing.

Numbers alone: no file, no cache, no plan. Changing what a function here returns changes every user's data.
"""
