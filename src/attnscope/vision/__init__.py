"""Pictures in prompts: which tokens they become, and where in the picture each token lies."""

from attnscope.vision.image_tokens import ImageTokens, image_token_id, image_tokens
from attnscope.vision.views import WHOLE, Box, View

__all__ = ["WHOLE", "Box", "ImageTokens", "View", "image_token_id", "image_tokens"]
