"""What there is to do: which tasks and splits, what they take, what is there already."""
