"""Vocabularies beside SeqIO's own, the files that they are made of, and features as text.

SentencePiece models and bytes are SeqIO's own classes, and not here.
"""

from anystep.lazy import lazy_names

__all__ = ["HuggingFaceVocabulary", "use_file"]

__getattr__ = lazy_names(__name__, {"HuggingFaceVocabulary": "hugging_face", "use_file": "files"})
