"""Names of quantities in titles, axes and captions: of measures, and of normalised masses."""

NAMES = {
    "entropy": "entropy (nats)",
    "first_token": "first-token mass",
    "query_mass": "mass",
    "query_weight": "attention weight",
    "query_entropy": "entropy (nats)",
    "lookback": "lookback ratio",
    "lookback_per_token": "lookback ratio per token",
    "induction": "induction score",
    "retrieval": "retrieval score",
    "previous_token": "previous-token score",
    "lambda": "λ",
    "on_rest": "attention beyond first and recent tokens",
    "max_logit": "largest score",
    "pointing": "pointing-game score",
    "box_ratio": "attention in the box over its area",
    "rerank_score": "score of the document",
    "log_self_mass": "log self-attention (nats)",
    "receiver_kurtosis": "kurtosis over sentences",
}
"""Measures whose column is not their name."""
NORMALISED = {
    "mass": "mass",
    "share": "share of the attention on the shown classes",
    "per-token": "attention per token of the class",
    "lift": "lift (1: no preference)",
}
DEFINITIONS = {
    "mass": "attention summed over the keys of a class, mean over queries",
    "share": "attention on the keys of a class, mean over queries, as a share of that on the shown "
    "classes",
    "per-token": "attention on the keys of a class divided by their number, mean over queries",
    "lift": "lift, the mass of a class divided by its mass under uniform attention",
}
TITLES = {
    "mass": "attention to {of}",
    "share": "share of attention on {of}",
    "per-token": "attention per token of {of}",
    "lift": "lift of {of}",
    "first_token": "attention to the first token",
    "flow": "attention from class to class",
}
"""Titles of normalised masses, and of measures that have another title than their name."""


def quantity(measure: str, normalise: str, of: str) -> dict[str, str]:
    """Words for a measure: `axis` with its unit, `measure` without, `title`, `definition`; `of`
    names the classes."""
    of_mass = measure == "mass"
    axis = NORMALISED[normalise] if of_mass else NAMES.get(measure, measure.replace("_", " "))
    name = axis.partition(" (")[0]
    key = normalise if of_mass else measure
    return {
        "axis": axis,
        "measure": name,
        "title": TITLES.get(key, name).format(of=of),
        "definition": DEFINITIONS[normalise] if of_mass else name,
    }
