"""Runs tasks of lm-evaluation-harness on a model under a condition, through the harness's API.

The harness writes the prompts and judges the completions. This module answers its requests and
measures the attention from the last prompt token. It needs the extra `attnscope[eval]`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from attnscope.capture.watch import watch
from attnscope.errors import InputError
from attnscope.evaluate.completions import generate_completions
from attnscope.evaluate.condition_parser import ParsedCondition
from attnscope.evaluate.likelihood import Continuation, likelihoods
from attnscope.tokens import TokenizedPrompt, apply_chat_template, prompt_from_ids, tokenize
from attnscope.tokens.regions import Prompt, Region
from attnscope.tokens.tokenized import PaddedBatch

try:
    from lm_eval.api.model import LM
except ImportError as error:
    raise InputError(
        "tasks of lm-evaluation-harness need the package lm-eval: pip install 'attnscope[eval]'",
        code="missing-package",
        package="lm-eval",
    ) from error

QUESTION = "question"
MEASURES = ("entropy", "first_token", "mass")
MAX_NEW_TOKENS = 256
"""Default maximum length of a completion, for tasks that set none."""
# Other generation settings that a task may have, with the values that change nothing.
_NEUTRAL = {"top_p": (1, 1.0), "num_beams": (1,), "top_k": (0,), "repetition_penalty": (1, 1.0)}


class ConditionedLM(LM):  # type: ignore[misc]
    """A model under a condition, with the interface that lm-evaluation-harness expects.

        lm = ConditionedLM(model, tokenizer, parse("filler:55"))
        lm_eval.simple_evaluate(model=lm, tasks=["arc_easy"])["results"]
        lm.attention                         # by document, layer and class

    A filler goes before the last user turn of a chat, and before a plain prompt.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        condition: ParsedCondition,
        *,
        batch: int = 16,
        seed: int = 0,
    ):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.condition = condition
        self.batch = batch
        self.seed = seed
        self.chats: dict[str, Prompt] = {}
        """Prompts after the chat template, by their text."""
        self.rows: list[pl.DataFrame] = []

    @property
    def tokenizer_name(self) -> str:
        """The harness caches prompts under this name."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The chat as text; `chats` keeps the position of its question."""
        last = max(n for n, turn in enumerate(chat_history) if turn["role"] == "user")
        turns = []
        for n, turn in enumerate(chat_history):
            text = turn["content"]
            regions = (Region(0, len(text), QUESTION),) if n == last else ()
            turns.append((turn["role"], Prompt(text, regions)))
        options = {} if add_generation_prompt else {"continue_final_message": True}
        prompt = apply_chat_template(
            turns, self.tokenizer, generation_prompt=add_generation_prompt, **options
        )
        self.chats[prompt.text] = prompt
        return prompt.text

    @property
    def attention(self) -> pl.DataFrame:
        """Entropy, first-token mass and the mass of every class for every request: attention
        from the last prompt token, mean over heads. Columns: task, document, layer, measure, item,
        value."""
        if not self.rows:
            raise InputError(
                "the harness has sent no request yet, so there is no attention to return",
                code="no-requests",
            )
        return pl.concat(self.rows)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Log-probability of every request's continuation given its context, and whether greedy
        decoding would generate it."""
        texts = [self._pair(*request.args) for request in requests]
        results: dict[int, tuple[float, bool]] = {}
        watched = _WatchedCondition(
            self, {id(text): r for (text, _), r in zip(texts, requests, strict=True)}
        )
        for some in likelihoods(self.model, self.tokenizer, watched, texts, batch=self.batch):
            results |= {n: (value, greedy) for n, value, greedy in some}
        return [results[n] for n in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Log-probability of complete texts, in windows as long as the model's positions."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        self._check_without_context()
        longest = getattr(self.model.config, "max_position_embeddings", None) or 2048
        texts: list[Continuation] = []
        owner: list[int] = []
        for n, request in enumerate(requests):
            ids = self.tokenizer(request.args[0], add_special_tokens=False)["input_ids"]
            windows = get_rolling_token_windows(ids, self._first, longest, 1)
            for context, rest in map(make_disjoint_window, windows):
                texts.append((prompt_from_ids([*context, *rest], self.tokenizer), len(context)))
                owner.append(n)
        sums = [0.0] * len(requests)
        watched = _WatchedCondition(
            self, {id(t): requests[n] for (t, _), n in zip(texts, owner, strict=True)}
        )
        for some in likelihoods(self.model, self.tokenizer, watched, texts, batch=self.batch):
            for n, value, _ in some:
                sums[owner[n]] += value
        return sums

    def generate_until(self, requests: list[Any]) -> list[str]:
        """The completion of every request, up to the first of its stop strings."""
        completions = [""] * len(requests)
        groups: dict[Any, list[int]] = {}
        for n, request in enumerate(requests):
            groups.setdefault(_generation_settings(request.args[1]), []).append(n)
        for (max_new_tokens, temperature, until), members in groups.items():
            prompts = [self._tokens(requests[n].args[0]) for n in members]
            watched = _WatchedCondition(
                self, {id(p): requests[n] for p, n in zip(prompts, members, strict=True)}
            )
            for some in generate_completions(
                *(self.model, self.tokenizer, watched, prompts),
                [(n, 0) for n in range(len(prompts))],
                max_new_tokens=max_new_tokens,
                batch=self.batch,
                temperature=temperature,
                seed=self.seed,
                until=until,
            ):
                for (n, _), text in some:
                    completions[members[n]] = text
        return completions

    @property
    def _first(self) -> int:
        """The token before a text without context."""
        first = self.tokenizer.bos_token_id
        return int(self.tokenizer.eos_token_id if first is None else first)

    def _prompt(self, text: str) -> Prompt:
        known = self.chats.get(text)
        return known or Prompt(text, (Region(0, len(text), QUESTION),))

    def _tokens(self, text: str) -> TokenizedPrompt:
        return tokenize(self._prompt(text), self.tokenizer)

    def _check_without_context(self) -> None:
        """Refuse conditions that change the context if a request has none: they would do nothing,
        and the difference from the baseline would be 0 by construction."""
        condition = self.condition
        if condition.condition.insert is not None or condition.attention_change is not None:
            raise InputError(
                f"condition {self.condition.name!r} changes the context, but the task scores a "
                "text without context; use baseline and arm, or another task",
                code="no-context",
                condition=self.condition.name,
            )

    def _pair(self, context: str, continuation: str) -> Continuation:
        """Context and continuation as one text, with the number of context tokens.

        Spaces between the two belong to the continuation, because tokens start with a space.
        """
        if not context:
            self._check_without_context()
            ids = self.tokenizer(continuation, add_special_tokens=False)["input_ids"]
            return prompt_from_ids([self._first, *ids], self.tokenizer), 1
        prompt = self.condition.change_prompt(self._tokens(context), self.tokenizer).prompt
        stripped = prompt.text.rstrip()
        regions = tuple(r for r in prompt.regions if r.end <= len(stripped))
        both = Prompt(prompt.text + continuation, prompt.regions, prompt.complete)
        before = Prompt(stripped, regions, prompt.complete)
        return tokenize(both, self.tokenizer), len(tokenize(before, self.tokenizer))


class _WatchedCondition:
    """A condition that also measures the attention."""

    def __init__(self, lm: ConditionedLM, owner: dict[int, Any]):
        self.lm = lm
        self.owner = owner
        """The request of every text, by the `id()` of the text."""
        self.changed: list[TokenizedPrompt] = []
        """Keeps the texts alive, so that no other object gets their `id()`."""

    @property
    def name(self) -> str:
        return self.lm.condition.name

    def change_prompt(self, prompt: TokenizedPrompt, tokenizer: Any) -> TokenizedPrompt:
        changed = self.lm.condition.change_prompt(prompt, tokenizer)
        self.owner[id(changed)] = self.owner[id(prompt)]
        self.changed.append(changed)
        return changed

    @contextmanager
    def intervention(
        self, model: Any, tokenizer: Any, batch: PaddedBatch, *, among: Any = None
    ) -> Iterator[None]:
        queries: Any = "last"
        if among is not None:
            last = among.sum(1) - 1
            queries = torch.from_numpy(np.arange(among.shape[1]) == last[:, None])
        with (
            self.lm.condition.intervention(model, tokenizer, batch, among=among),
            watch(model, queries=queries) as scope,
        ):
            yield
        of = [self.owner[id(row)] for row in batch.rows]
        frame = scope.to_frame(tokenizer, MEASURES).group_by(
            "sequence", "layer", "measure", "item", maintain_order=True
        )
        names = pl.DataFrame(
            {
                "sequence": range(len(of)),
                "task": [request.task_name for request in of],
                "document": [request.doc_id for request in of],
            },
            schema_overrides={"task": pl.String, "document": pl.Int64},
        )
        mean = frame.agg(pl.col("value").mean()).join(names, on="sequence", maintain_order="left")
        self.lm.rows.append(mean.select("task", "document", "layer", "measure", "item", "value"))


def _generation_settings(settings: Mapping[str, Any]) -> tuple[int, float, tuple[str, ...]]:
    """Maximum number of new tokens, temperature and stop strings of a task.

    Any other setting that would change the completion is an error.
    """
    rest = dict(settings)
    until = rest.pop("until", None) or []
    until = (until,) if isinstance(until, str) else tuple(until)
    limit = rest.pop("max_gen_toks", None) or rest.pop("max_new_tokens", None) or MAX_NEW_TOKENS
    temperature = float(rest.pop("temperature", 0.0) or 0.0)
    if not rest.pop("do_sample", temperature > 0):
        temperature = 0.0
    for name, value in rest.items():
        if value is not None and value not in _NEUTRAL.get(name, ()):
            raise InputError(
                f"the task sets {name}={value!r} for generation, which attnscope does not support; "
                "supported: until, max_gen_toks, do_sample, temperature",
                code="unsupported-argument",
                argument=name,
                value=value,
            )
    return int(limit), temperature, until


def evaluate_task(
    model: Any,
    tokenizer: Any,
    condition: ParsedCondition,
    task: str,
    *,
    problems: int | None,
    chat: bool,
    batch: int,
    seed: int,
) -> tuple[dict[str, Any], pl.DataFrame]:
    """Run one task of the harness, by name or YAML file: its results, and the attention."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    lm = ConditionedLM(model, tokenizer, condition, batch=batch, seed=seed)
    file = Path(task)
    local = file.suffix in (".yaml", ".yml")
    if local and not file.is_file():
        raise InputError(
            f"there is no file {task}; give a YAML file of a task, or lm-eval:NAME",
            code="file-missing",
            path=task,
        )
    try:
        results = lm_eval.simple_evaluate(
            model=lm,
            tasks=[task],
            limit=problems,
            apply_chat_template=chat,
            bootstrap_iters=0,
            task_manager=TaskManager(include_defaults=not local),
        )
    except (KeyError, ValueError, FileNotFoundError) as error:
        raise InputError(
            f"lm-evaluation-harness refuses the task {task!r}: {error}",
            code="task-refused",
            task=task,
        ) from error
    return dict(results or {}), lm.attention


def document_scores(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per metric and document: task, metric, problem, value, completion, and the harness's
    score of the metric over all documents."""
    rows = []
    for task, lines in results["samples"].items():
        for line in lines:
            for metric in line["metrics"]:
                value = line[metric]
                if not isinstance(value, bool | int | float | np.number):
                    continue  # a metric that exists only over all documents
                name = f"{metric},{line['filter']}"
                rows.append(
                    {
                        "task": task,
                        "metric": name,
                        "problem": line["doc_id"],
                        "value": float(value),
                        "completion": " | ".join(map(str, line["filtered_resps"])),
                        "score": float(results["results"][task][name]),
                    }
                )
    if not rows:
        raise InputError(
            "the task has no score per document, so conditions cannot be compared",
            code="no-document-scores",
        )
    return rows
