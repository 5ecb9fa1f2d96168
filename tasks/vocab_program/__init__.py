"""`anystep-vocab`: SentencePiece models trained on a task's text, and what vocabularies' files hold.

Classes of vocabularies are in `anystep.tasks.vocabularies`.
"""
