"""`make demo`: a run that is killed and resumed beside one that is not, and a page that compares them."""
