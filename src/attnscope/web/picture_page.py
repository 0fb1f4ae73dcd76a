"""The page of a question about a picture: one run of the model, and a heat map for each token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from markupsafe import Markup

from attnscope.errors import InputError
from attnscope.figures.page import templates
from attnscope.web.api_schemas import PictureRequest
from attnscope.web.downloads import TEMPLATES
from attnscope.web.jobs import GoneError
from attnscope.web.model_cache import Loaded

KEPT = 8
"""How many pages are kept; the oldest is dropped first."""


class PicturePages:
    """The newest pages, by id."""

    def __init__(self) -> None:
        self._pages: OrderedDict[str, str] = OrderedDict()

    def put(self, html: str) -> str:
        """Keep a page; returns its id."""
        id = uuid4().hex
        self._pages[id] = html
        while len(self._pages) > KEPT:
            self._pages.popitem(last=False)
        return id

    def get(self, id: str) -> str:
        """The page with this id."""
        if id not in self._pages:
            raise GoneError(
                f"the server no longer has the page {id!r}; measure the picture again",
                code="unknown-page",
                page=id,
            )
        return self._pages[id]


def picture_page(
    loaded: Loaded, request: PictureRequest, question: str, check: Callable[[], None]
) -> str:
    """One HTML file: the picture with a heat map that follows the token that is pointed at.

    Args:
        loaded: The model.
        request: The picture as base64, the system prompt and the length of the completion.
        question: The question about the picture.
        check: Called before the model runs; raises an error to stop.
    """
    import torch

    import attnscope
    from attnscope.experiment.completion import greedy_config
    from attnscope.loading import load_processor
    from attnscope.vision.pictures import decode, from_base64

    if not question.strip():
        raise InputError("the question is empty; type a text", code="empty-prompt")
    picture = decode(from_base64(request.image.partition(",")[2]), "the picture")
    processor = load_processor(loaded.source)
    text = _prompt(processor, question, request.system)
    inputs = processor(text=[text], images=[picture], return_tensors="pt").to(loaded.model.device)
    check()
    with torch.no_grad(), attnscope.watch(loaded.model, keep=True) as scope:
        if request.completion:
            settings = greedy_config(loaded.model, loaded.tokenizer, request.completion)
            ids = loaded.model.generate(**inputs, generation_config=settings)[:, :-1]
        else:
            loaded.model(**inputs)
            ids = inputs["input_ids"]
    scope.place_images(processor, {**inputs, "input_ids": ids}, [picture])
    shown = scope.show(processor, input_ids=ids)
    template = templates(TEMPLATES).get_template("view.html")
    return template.render(model=loaded.name, text=Markup(shown.html))


def _prompt(processor: Any, question: str, system: str | None) -> str:
    """The text of a question about one picture, in the chat format if there is one."""
    from attnscope.vision.prompt_text import picture_mark

    if not getattr(processor, "chat_template", None):
        return f"{picture_mark(processor)}\n{question}"
    parts = [{"type": "image"}, {"type": "text", "text": question}]
    turns: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    if system:
        turns.insert(0, {"role": "system", "content": system})
    return str(processor.apply_chat_template(turns, add_generation_prompt=True))
