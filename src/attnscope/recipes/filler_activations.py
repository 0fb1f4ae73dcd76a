"""What a filler does to the activations of a question's tokens (arXiv 2510.01032).

Measured after the MLP's non-linearity: activations near zero, large activations and norms, and
whether digits, operators and conjunctions are nearer to zero than words. Only tokens of the
question count, because the activations of the filler are not its effect. Questions are equations,
because word problems have no operators.
"""

from typing import Any

from attnscope.recipes.filler_profile import SLASHES, filler_experiment
from attnscope.recipes.recipe import Recipe
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


RECIPE = Recipe(
    name="filler-activations",
    paper="arXiv 2510.01032",
    question="what does a filler do to the activations of the question?",
    experiment=filler_activations,
    figures={"near-zero": {}},
    # Only tokens of the question count: the activations of the filler are not its effect.
    claim_lines={
        "livelier-activations": (
            "near_zero[keys=question, condition=kind:repeat] <= 0.95 * "
            "near_zero[keys=question, condition=base] in layer 0",
            "large[keys=question, condition=kind:repeat] >= 1.05 * large[keys=question, "
            "condition=base] in layer 0",
            "activation_l1[keys=question, condition=kind:repeat] >= 1.05 * "
            "activation_l1[keys=question, condition=base] in layer 0",
            "activation_l2[keys=question, condition=kind:repeat] >= 1.05 * "
            "activation_l2[keys=question, condition=base] in layer 0",
        ),
        "digits-near-zero": (
            "class_near_zero[keys=question, classes=default, class=digit] >= 1.05 * "
            "class_near_zero[keys=question, classes=default, class=word] in layer 0",
            "class_near_zero[keys=question, classes=default, class=operator] >= 1.05 * "
            "class_near_zero[keys=question, classes=default, class=word] in layer 0",
            "class_near_zero[keys=question, classes=default, class=conjunction] >= 1.05 * "
            "class_near_zero[keys=question, classes=default, class=word] in layer 0",
        ),
    },
)
