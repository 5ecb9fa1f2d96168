"""Examples of runs, and a module of a network of one's own."""
