"""Vocabularies beside SeqIO's own, the files that they are made of, and features as text.

SentencePiece models and bytes are SeqIO's own classes, and not here.
"""

from anystep.tasks.vocabularies.files import use_file
from anystep.tasks.vocabularies.hugging_face import HuggingFaceVocabulary

__all__ = ["HuggingFaceVocabulary", "use_file"]
