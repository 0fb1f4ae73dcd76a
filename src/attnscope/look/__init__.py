"""A look at one text: its tokens, their classes, and where the model's attention goes."""

from attnscope.look.text_measures import Look, look

__all__ = ["Look", "look"]
