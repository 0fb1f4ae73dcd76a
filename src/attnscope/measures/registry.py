"""Every measure there is. The spec's choices, the runner, the evidence for claims and the table in
docs/measures.md are made from this.
"""

from attnscope.measures.activation_shape import GINI, HISTOGRAM
from attnscope.measures.activations import ACTIVATIONS, CLASS_ACTIVATIONS
from attnscope.measures.affine import AFFINE, AFFINE_HEADS
from attnscope.measures.answers import LOOKBACK, RETRIEVAL, STEP_MASS
from attnscope.measures.by_distance import BY_DISTANCE
from attnscope.measures.by_query import QUERY_ENTROPY, QUERY_MASS, QUERY_WEIGHT
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
    measure.name: measure
    for measure in (
        MASS,
        FLOW,
        ENTROPY,
        EFFECTIVE_TOKENS,
        FIRST_TOKEN,
        SELF_MASS,
        DISTANCE,
        SINK_MASS,
        PREVIOUS_TOKEN,
        INDUCTION,
        RENYI2,
        BY_DISTANCE,
        LARGEST,
        LAMBDA,
        EVEN_SLOPE,
        SPIKES,
        RESHAPING,
        UNIFORMITY,
        VALUE_SIMILARITY,
        AFFINE,
        AFFINE_HEADS,
        ACTIVATIONS,
        CLASS_ACTIVATIONS,
        HISTOGRAM,
        GINI,
        LOOKBACK,
        RETRIEVAL,
        STEP_MASS,
        PROFILE,
        QUERY_MASS,
        QUERY_WEIGHT,
        QUERY_ENTROPY,
    )
}
"""By the name that an experiment lists under `measures`."""

COLUMNS: dict[str, Measure] = {
    column: measure for measure in MEASURES.values() for column in measure.columns
}
"""By the name that its numbers have in a run."""
