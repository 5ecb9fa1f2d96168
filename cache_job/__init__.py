"""The Beam job that turns a SeqIO task into a deterministic cache."""
