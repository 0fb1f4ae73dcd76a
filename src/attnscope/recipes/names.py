"""Labels for models: what tables and figures call them."""

from collections.abc import Mapping, Sequence

from attnscope.errors import InputError

__all__ = ["labelled"]


def labelled(models: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Label to name. A bare name is labelled by its last part: `zoo:chat-llama` by `chat-llama`."""
    if isinstance(models, Mapping):
        return dict(models)
    named = {name.rstrip("/").replace(":", "/").rsplit("/", 1)[-1]: name for name in models}
    if len(named) < len(models):
        raise InputError(
            f"two of the models have the same last name ({', '.join(models)}); label them: "
            "before=NAME after=NAME"
        )
    return named
