"""Hugging Face's Trainer on workers that join, leave and die: `evenstep.adapters.hf.Trainer`."""

from __future__ import annotations

try:
    import transformers as _transformers  # noqa: F401
except ImportError:
    raise ImportError('this adapter needs: pip install "evenstep[hf]"') from None

from evenstep.adapters.hf.arguments import TrainingArguments
from evenstep.adapters.hf.trainer import ElasticMixin, Trainer

__all__ = ["ElasticMixin", "Trainer", "TrainingArguments"]
