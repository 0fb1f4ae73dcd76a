"""Runs tasks of lm-evaluation-harness on a model under a condition, through the harness's API.

The harness writes the prompts and judges the completions. This module answers its requests and
measures the attention from the last prompt token. It needs the extra `attnscope[eval]`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from jinja2 import TemplateError

from attnscope.errors import InputError, missing_package
from attnscope.evaluate.likelihood import Continuation, likelihoods
from attnscope.experiment.completion import complete
from attnscope.experiment.intervene import intervene
from attnscope.loading.compatibility import check_fit
from attnscope.prompts import insert
from attnscope.scope.watch import watch
from attnscope.spec.conditions import Condition
from attnscope.spec.generate import Generate
from attnscope.tokens import (
    DEFAULT,
    ClassSet,
    TokenizedPrompt,
    apply_chat_template,
    pad,
    prompt_from_ids,
    tokenize,
)
from attnscope.tokens.regions import Prompt, Region
from attnscope.tokens.tokenized import PaddedBatch

try:
    from lm_eval.api.model import LM
except ImportError as error:
    raise missing_package("a task of lm-evaluation-harness", "lm-eval", "eval") from error

QUESTION = "question"
MEASURES = ("entropy", "first_token", "mass", "lift")
MAX_NEW_TOKENS = 256
"""Default maximum length of a completion, for tasks that set none."""
# Other generation settings that a task may have, with the values that change nothing.
_NEUTRAL = {"top_p": (1, 1.0), "num_beams": (1,), "top_k": (0,), "repetition_penalty": (1, 1.0)}


class ConditionedLM(LM):  # type: ignore[misc]
    """A model under a condition, with the interface that lm-evaluation-harness expects.

        lm = ConditionedLM(model, tokenizer, Condition(insert=Insert(count=55)))
        lm_eval.simple_evaluate(model=lm, tasks=["arc_easy"])["results"]
        lm.attention                         # by document, layer and class

    A filler goes before the last user turn of a chat, and before a plain prompt.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        condition: Condition,
        *,
        batch: int = 16,
        seed: int = 0,
        classes: ClassSet = DEFAULT,
    ):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.condition = condition
        self.batch = batch
        self.seed = seed
        self.classes = classes
        self.chats: dict[str, Prompt] = {}
        """Prompts after the chat template, by their text."""
        self.lengths: dict[tuple[str, int], int] = {}
        """Tokens of the first request of every task and document."""
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
        options: dict[str, Any] = {}
        if not add_generation_prompt:
            options["continue_final_message"] = True
        prompt = apply_chat_template(
            turns, self.tokenizer, generation_prompt=add_generation_prompt, **options
        )
        self.chats[prompt.text] = prompt
        return prompt.text

    @property
    def attention(self) -> pl.DataFrame:
        """Entropy, first-token mass and the mass of every class: attention from the last prompt
        token, mean over the requests of a document. Columns: task, document, layer, head, measure,
        item, value, and `uniform`: the mass under uniform attention."""
        if not self.rows:
            raise InputError(
                "the harness has sent no request yet, so there is no attention to return",
                code="no-requests",
            )
        every = pl.concat(self.rows)
        keys = [name for name in every.columns if name not in ("value", "uniform")]
        return every.group_by(keys, maintain_order=True).agg(pl.col("value", "uniform").mean())

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Log-probability of every request's continuation given its context, and whether greedy
        decoding would generate it."""
        texts = [self._pair(request) for request in requests]
        results = self._likelihoods(texts, requests)
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
        for n, (value, _) in self._likelihoods(texts, [requests[n] for n in owner]).items():
            sums[owner[n]] += value
        return sums

    def _likelihoods(
        self, texts: Sequence[Continuation], requests: Sequence[Any]
    ) -> dict[int, tuple[float, bool]]:
        """By index of the text; `requests` has the request of each."""
        self._check_fit([text for text, _ in texts])

        @contextmanager
        def block(batch: PaddedBatch, members: list[int], context: Any) -> Iterator[None]:
            last = np.arange(context.shape[1]) == context.sum(1)[:, None] - 1
            owners = [requests[n] for n in members]
            with self._measured(batch, owners, torch.from_numpy(last), among=context):
                yield

        scored = likelihoods(self.model, self.tokenizer, texts, block, batch=self.batch)
        return {n: (value, greedy) for n, value, greedy in scored}

    def generate_until(self, requests: list[Any]) -> list[str]:
        """The completion of every request, up to the first of its stop strings."""
        completions = [""] * len(requests)
        groups: dict[Any, list[int]] = {}
        for n, request in enumerate(requests):
            groups.setdefault(_generation_settings(request.args[1]), []).append(n)
        for (max_new_tokens, temperature, until), members in groups.items():
            sampling = {"sample": True, "temperature": temperature, "seed": self.seed}
            generate = Generate(
                max_new_tokens=max_new_tokens, **(sampling if temperature > 0 else {})
            )
            prompts = {n: self._changed(requests[n], requests[n].args[0]) for n in members}
            self._check_fit(list(prompts.values()), max_new_tokens)
            order = sorted(members, key=lambda n: len(prompts[n]))
            for first in range(0, len(order), self.batch):
                some = order[first : first + self.batch]
                batch = pad([prompts[n] for n in some], self.tokenizer, side="left")
                owners = [requests[n] for n in some]
                numbers = [request.doc_id for request in owners]
                with torch.no_grad(), self._measured(batch, owners, "last"):
                    new = complete(
                        self.model, self.tokenizer, batch, generate, numbers, until=until
                    )
                texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
                for n, text in zip(some, texts, strict=True):
                    ends = [text.find(end) for end in until if end in text]
                    completions[n] = text[: min(ends, default=len(text))]
        return completions

    @contextmanager
    def _measured(
        self, batch: PaddedBatch, owners: Sequence[Any], queries: Any, among: Any = None
    ) -> Iterator[None]:
        """A pass under the condition; measures the attention of each text for its request.

        `among`, bool [batch, tokens], marks the prompt where a continuation follows it.
        """
        change = self.condition.knockout or self.condition.steer
        if change is not None and change.region is not None:
            batch.mask(change.region)  # raises if a prompt does not have the region
        with (
            intervene(self.condition, self.model, self.tokenizer, batch, [self.classes], among),
            watch(self.model, queries=queries) as scope,
        ):
            yield
        for row, request in zip(batch.rows, owners, strict=True):
            self.lengths.setdefault((request.task_name, request.doc_id), len(row))
        names = pl.DataFrame(
            {
                "sequence": range(len(owners)),
                "task": [request.task_name for request in owners],
                "document": [request.doc_id for request in owners],
            },
            schema_overrides={"task": pl.String, "document": pl.Int64},
        )
        keys = ["sequence", "layer", "head", "item"]
        frame = scope.to_frame(self.tokenizer, MEASURES, classes=self.classes).select(
            *keys, "measure", "value"
        )
        lift = frame.filter(pl.col("measure") == "lift").select(
            *keys, pl.lit("mass").alias("measure"), pl.col("value").alias("lift")
        )
        frame = (
            frame.filter(pl.col("measure") != "lift")
            .join(lift, on=[*keys, "measure"], how="left", nulls_equal=True, maintain_order="left")
            .join(names, on="sequence", maintain_order="left")
        )
        uniform = (pl.col("value") / pl.col("lift")).fill_nan(None).alias("uniform")
        self.rows.append(frame.select("task", "document", *keys[1:], "measure", "value", uniform))

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

    def _changed(self, request: Any, text: str) -> TokenizedPrompt:
        """The prompt under the condition; the filler of document n has the seed of prompt n."""
        prompt, filler = self._tokens(text), self.condition.insert
        if filler is None:
            return prompt
        position, by = self.condition.position, self.condition.by
        put = insert(
            prompt, filler.filler(request.doc_id), self.tokenizer, position=position, by=by
        )
        return put.variant

    def _check_fit(self, texts: Sequence[TokenizedPrompt], new_tokens: int = 1) -> None:
        """The last generated token is not fed to the model, so it needs no position."""
        for text in texts:
            ids = np.pad(text.ids, (0, new_tokens - 1), mode="edge") if len(text) else text.ids
            check_fit(self.model.config, ids, beyond=None)

    def _check_without_context(self) -> None:
        """Refuse conditions that change the context if a request has none: they would do nothing,
        and the difference from the baseline would be 0 by construction."""
        condition = self.condition
        if condition.insert or condition.knockout or condition.steer:
            raise InputError(
                f"the condition {condition.kind!r} changes the context, but the task scores a text "
                "without context; use baseline and arm, or another task",
                code="no-context",
                condition=condition.kind,
            )

    def _pair(self, request: Any) -> Continuation:
        """Context and continuation as one text, with the number of context tokens.

        Spaces between the two belong to the continuation, because tokens start with a space.
        """
        context, continuation = request.args
        if not context:
            self._check_without_context()
            ids = self.tokenizer(continuation, add_special_tokens=False)["input_ids"]
            return prompt_from_ids([self._first, *ids], self.tokenizer), 1
        prompt = self._changed(request, context).prompt
        stripped = prompt.text.rstrip()
        regions = tuple(r for r in prompt.regions if r.end <= len(stripped))
        both = Prompt(prompt.text + continuation, prompt.regions, prompt.complete)
        before = Prompt(stripped, regions, prompt.complete)
        return tokenize(both, self.tokenizer), len(tokenize(before, self.tokenizer))


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


def run_task(lm: ConditionedLM, task: str, *, problems: int | None, chat: bool) -> dict[str, Any]:
    """The results of one task of the harness, by name or YAML file."""
    import lm_eval
    from lm_eval.tasks import TaskManager

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
    except (LookupError, ValueError, FileNotFoundError, TemplateError) as error:
        raise InputError(
            f"lm-evaluation-harness refuses the task {task!r}: {type(error).__name__}: {error}",
            code="task-refused",
            task=task,
        ) from error
    return dict(results or {})


def document_scores(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per metric and document: task, document, metric, answer, completion, value, and the
    harness's score of the metric over all documents."""
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
                        "document": int(line["doc_id"]),
                        "metric": name,
                        "answer": str(line.get("target", "")),
                        "completion": " | ".join(map(str, line["filtered_resps"])),
                        "value": float(value),
                        "score": float(results["results"][task][name]),
                    }
                )
    if not rows:
        raise InputError(
            "the task has no score per document, so conditions cannot be compared",
            code="no-document-scores",
        )
    return rows
