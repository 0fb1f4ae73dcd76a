"""How the cross-attention of a speech model follows the sound."""

import numpy as np

from attnscope.measures.layer import Layer, Sound, Tensor
from attnscope.measures.measure import SHARE, Measure, Numbers


def centre(sound: Sound) -> Tensor:
    """[B, H, Q]: the mean position of a query's attention among the frames with sound, 0 … 1 of all
    frames; nan where there is no query, or no attention to them."""
    frames = sound.word_of_frame.shape[1]
    position = (np.arange(frames) + 0.5) / frames
    heard = np.arange(frames) < sound.frames[:, None]
    shares = np.stack([heard * position, heard * (1 - position)], axis=-1)
    mass = sound.cross.mass(_float(sound, shares), 2)
    return mass[..., 0] / mass.sum(-1)


def order(values: Tensor) -> Tensor:
    """[B, H]: Kendall's τ of values [B, H, Q] and their order: the share of pairs in rising order
    minus that in falling order. Values that are nan are left out."""
    differences = values[..., None, :] - values[..., :, None]
    earlier = np.triu(np.ones((values.shape[-1],) * 2, dtype=bool), 1)
    counted = _bool(values, earlier) & ~differences.isnan()  # torch takes the sign of nan as 0
    return differences.sign().where(counted, np.nan).nanmean((-2, -1))


def _alignment(layer: Layer) -> Tensor:
    return order(centre(layer.heard).double())


def _word_mass(layer: Layer) -> Numbers:
    """The attention to the word that is predicted, and to the word that was read last."""
    sound = layer.heard
    words = sound.word_of_frame.max() + 1
    mass = sound.cross.mass(sound.cross.positions.new_tensor(sound.word_of_frame), int(words))
    read = sound.word_of_token
    predicted = np.pad(read[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    length = np.stack([(sound.word_of_frame == w).mean(1) for w in range(words)], axis=1)
    parts = [_at_word(sound, mass, length, of) for of in (predicted, read)]
    value, uniform, tokens = zip(*parts, strict=True)
    return Numbers(_stack(value), uniform=_stack(uniform), tokens=_stack(tokens))


def _at_word(
    sound: Sound, mass: Tensor, length: np.ndarray, words: np.ndarray
) -> tuple[Tensor, Tensor, Tensor]:
    """Means over the queries that have a word: their mass on it [B, H], that of uniform attention
    [B, 1], and the number of queries [B, 1]."""
    where = sound.cross.positions
    word = where.new_tensor(words).gather(1, where.clamp(min=0)).where(where >= 0, -1)
    has_word, index = word >= 0, word.clamp(min=0)
    of_word = mass.gather(3, index[:, None, :, None].expand(*mass.shape[:3], 1))[..., 0]
    value = of_word.where(has_word[:, None], np.nan).nanmean(-1)
    uniform = _float(sound, length).gather(1, index).where(has_word, np.nan).nanmean(-1)
    return value, uniform[:, None], has_word.sum(-1)[:, None]


def _stack(parts: tuple[Tensor, ...]) -> Tensor:
    from torch import stack

    return stack(parts, -1)


def _float(sound: Sound, array: np.ndarray) -> Tensor:
    from torch import float64, from_numpy

    return from_numpy(array).to(sound.cross.positions.device, float64)


def _bool(like: Tensor, array: np.ndarray) -> Tensor:
    from torch import from_numpy

    return from_numpy(array).to(like.device)


ALIGNMENT = Measure(
    name="alignment",
    range=(-1.0, 1.0),
    description="of cross-attention to sound: Kendall's rank correlation of the order of the "
    "queries and the mean position of their attention in the sound",
    level="head",
    needs=frozenset({"sums", "sound"}),
    function=_alignment,
)

WORD_MASS = Measure(
    name="word_mass",
    range=SHARE,
    description="cross-attention to the sound of one word, mean over queries: the word that is "
    "predicted, or the word that was read last",
    level="head",
    items=("predicted", "read"),
    default="predicted",
    needs=frozenset({"sums", "sound"}),
    function=_word_mass,
)
