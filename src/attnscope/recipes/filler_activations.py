"""What a filler does to the activations of a question's tokens (arXiv 2510.01032).

After the MLP's non-linearity: fewer near zero, more large, larger norms? And are digits, operators
and conjunctions nearer to zero than words? Over the question's tokens, which stand in both prompts:
the filler's own activations are not its effect. Questions are written with operators, because word
problems have none.
"""

from typing import Any

from attnscope.recipes.filler_profile import SLASHES, filler_experiment
from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled
from attnscope.spec.experiment import Experiment

MEASURES = ("activations", "class_near_zero")


def filler_activations(
    models: Models = SMOLLM2, prompts: int = 64, seed: int = 0, layers: Any = (0,), **keys: Any
) -> Experiment:
    """Activations of the question's tokens with 55 slashes before them, and without."""
    defaults = {
        "prompts": {"source": "equations", "count": prompts, "seed": seed},
        "layers": layers,
        "keys": ["question"],
        "measures": list(MEASURES),
        "profiles": {},
    }
    return filler_experiment(
        "filler-activations",
        labelled(models),
        (prompts, seed),
        {"filler": SLASHES},
        layers,
        (0,),
        MEASURES,
        {**defaults, **keys},
    )
