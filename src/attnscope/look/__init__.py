"""Measure and show the attention of one text: its tokens, their classes and weights."""

from attnscope.look.text_measures import Look, look

__all__ = ["Look", "look"]
