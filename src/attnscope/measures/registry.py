"""Every measure there is. The spec's choices, the runner, the evidence for claims and the table in
docs/measures.md are made from this.
"""

from attnscope.measures.activations import ACTIVATIONS, CLASS_ACTIVATIONS
from attnscope.measures.affine import AFFINE, AFFINE_HEADS
from attnscope.measures.answers import LOOKBACK, RETRIEVAL, STEP_MASS
from attnscope.measures.by_distance import BY_DISTANCE
from attnscope.measures.chosen_keys import INDUCTION, PREVIOUS_TOKEN
from attnscope.measures.distance import DISTANCE
from attnscope.measures.effective_tokens import EFFECTIVE_TOKENS
from attnscope.measures.entropy import ENTROPY
from attnscope.measures.first_token import FIRST_TOKEN
from attnscope.measures.flow import FLOW
from attnscope.measures.largest import LARGEST
from attnscope.measures.mass import MASS
from attnscope.measures.measure import Measure
from attnscope.measures.received import PROFILE
from attnscope.measures.renyi2 import RENYI2
from attnscope.measures.reshaping import RESHAPING
from attnscope.measures.self_mass import SELF_MASS
from attnscope.measures.sink_mass import SINK_MASS
from attnscope.measures.slope import EVEN_SLOPE, LAMBDA
from attnscope.measures.spikes import SPIKES
from attnscope.measures.uniformity import UNIFORMITY
from attnscope.measures.values import VALUE_SIMILARITY

MEASURES: dict[str, Measure] = {
    "mass": MASS,
    "flow": FLOW,
    "entropy": ENTROPY,
    "effective_tokens": EFFECTIVE_TOKENS,
    "first_token": FIRST_TOKEN,
    "self_mass": SELF_MASS,
    "distance": DISTANCE,
    "sink_mass": SINK_MASS,
    "previous_token": PREVIOUS_TOKEN,
    "induction": INDUCTION,
    "renyi2": RENYI2,
    "by_distance": BY_DISTANCE,
    "largest": LARGEST,
    "lambda": LAMBDA,
    "even_slope": EVEN_SLOPE,
    "spikes": SPIKES,
    "reshaping": RESHAPING,
    "uniformity": UNIFORMITY,
    "value_similarity": VALUE_SIMILARITY,
    "affine": AFFINE,
    "affine_heads": AFFINE_HEADS,
    "activations": ACTIVATIONS,
    "class_near_zero": CLASS_ACTIVATIONS,
    "lookback": LOOKBACK,
    "retrieval": RETRIEVAL,
    "step_mass": STEP_MASS,
    "profile": PROFILE,
}
"""By the name that an experiment lists under `measures`."""

COLUMNS: dict[str, Measure] = {
    column: measure for measure in MEASURES.values() for column in measure.columns
}
"""By the name that its numbers have in a run."""
