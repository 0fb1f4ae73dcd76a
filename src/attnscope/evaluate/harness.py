"""lm-evaluation-harness, by its own API: any of its tasks, asked of a model under a condition.

Its tasks write the prompts, choose what is compared and judge it; here its requests are answered,
and the attention is watched from where each answer begins. Needs the extra `attnscope[eval]`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from attnscope.capture.watch import watch
from attnscope.errors import InputError
from attnscope.evaluate.completions import answers
from attnscope.evaluate.condition_parser import ParsedCondition
from attnscope.evaluate.likelihood import Continued, likelihoods
from attnscope.tokens import TokenizedPrompt, apply_chat_template, spelled, tokenize
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
LONGEST = 256
"""Tokens of an answer, where a task does not say."""
# What else a task may say of generation, and the value at which it changes nothing.
_NEUTRAL = {"top_p": (1, 1.0), "num_beams": (1,), "top_k": (0,), "repetition_penalty": (1, 1.0)}


class ConditionedLM(LM):  # type: ignore[misc]
    """A model under a condition, as lm-evaluation-harness wants it.

        lm = Conditioned(model, tokenizer, parse("filler:55"))
        lm_eval.simple_evaluate(model=lm, tasks=["arc_easy"])["results"]
        lm.attention                         # by document, layer and class

    A filler goes in front of the last user's turn of a chat, and of the whole of a plain prompt.
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
        """Prompts that went through the chat template, by their text."""
        self.rows: list[pl.DataFrame] = []

    @property
    def tokenizer_name(self) -> str:
        """What prompts depend on."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The chat as text; where its question is, is remembered."""
        last = max(n for n, turn in enumerate(chat_history) if turn["role"] == "user")
        turns = []
        for n, turn in enumerate(chat_history):
            said = turn["content"]
            regions = (Region(0, len(said), QUESTION),) if n == last else ()
            turns.append((turn["role"], Prompt(said, regions)))
        options = {} if add_generation_prompt else {"continue_final_message": True}
        prompt = apply_chat_template(
            turns, self.tokenizer, generation_prompt=add_generation_prompt, **options
        )
        self.chats[prompt.text] = prompt
        return prompt.text

    @property
    def attention(self) -> pl.DataFrame:
        """Of every request: entropy, first-token mass and the mass of every class, mean over
        heads, of the attention from where its answer begins; columns task, document, layer,
        measure, item, value."""
        if not self.rows:
            raise InputError(
                "the harness has sent no request yet, so there is no attention to return",
                code="no-requests",
            )
        return pl.concat(self.rows)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Of every request's continuation, given its context."""
        texts = [self._pair(*request.args) for request in requests]
        found: dict[int, tuple[float, bool]] = {}
        watched = _Watched(
            self, {id(text): r for (text, _), r in zip(texts, requests, strict=True)}
        )
        for some in likelihoods(self.model, self.tokenizer, watched, texts, batch=self.batch):
            found |= {n: (value, greedy) for n, value, greedy in some}
        return [found[n] for n in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Of whole texts, in windows as long as the model reads."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        self._check_without_context()
        longest = getattr(self.model.config, "max_position_embeddings", None) or 2048
        texts: list[Continued] = []
        owner: list[int] = []
        for n, request in enumerate(requests):
            ids = self.tokenizer(request.args[0], add_special_tokens=False)["input_ids"]
            windows = get_rolling_token_windows(ids, self._first, longest, 1)
            for context, rest in map(make_disjoint_window, windows):
                texts.append((spelled([*context, *rest], self.tokenizer), len(context)))
                owner.append(n)
        sums = [0.0] * len(requests)
        watched = _Watched(
            self, {id(t): requests[n] for (t, _), n in zip(texts, owner, strict=True)}
        )
        for some in likelihoods(self.model, self.tokenizer, watched, texts, batch=self.batch):
            for n, value, _ in some:
                sums[owner[n]] += value
        return sums

    def generate_until(self, requests: list[Any]) -> list[str]:
        """What the model says, up to the first of the words that end it."""
        said = [""] * len(requests)
        groups: dict[Any, list[int]] = {}
        for n, request in enumerate(requests):
            groups.setdefault(_settings(request.args[1]), []).append(n)
        for (longest, temperature, until), members in groups.items():
            prompts = [self._tokens(requests[n].args[0]) for n in members]
            watched = _Watched(
                self, {id(p): requests[n] for p, n in zip(prompts, members, strict=True)}
            )
            for some in answers(
                *(self.model, self.tokenizer, watched, prompts),
                [(n, 0) for n in range(len(prompts))],
                longest=longest,
                batch=self.batch,
                temperature=temperature,
                seed=self.seed,
                until=until,
            ):
                for (n, _), text in some:
                    said[members[n]] = text
        return said

    @property
    def _first(self) -> int:
        """What stands before a text that has no context."""
        first = self.tokenizer.bos_token_id
        return int(self.tokenizer.eos_token_id if first is None else first)

    def _prompt(self, text: str) -> Prompt:
        known = self.chats.get(text)
        return known or Prompt(text, (Region(0, len(text), QUESTION),))

    def _tokens(self, text: str) -> TokenizedPrompt:
        return tokenize(self._prompt(text), self.tokenizer)

    def _check_without_context(self) -> None:
        """Refuse conditions that change the context, where a request has none: they would do
        nothing, and the difference from the baseline would be 0 by construction."""
        if self.condition.what.insert is not None or self.condition.cut is not None:
            raise InputError(
                f"condition {self.condition.name!r} changes the context, but the task scores a "
                "text without context; use baseline and arm, or another task",
                code="no-context",
                condition=self.condition.name,
            )

    def _pair(self, context: str, continuation: str) -> Continued:
        """Context and continuation as one text, cut where the context ends; spaces between them
        belong to the continuation, as tokens have them."""
        if not context:
            self._check_without_context()
            ids = self.tokenizer(continuation, add_special_tokens=False)["input_ids"]
            return spelled([self._first, *ids], self.tokenizer), 1
        put = self.condition.asked(self._tokens(context), self.tokenizer).prompt
        bare = put.text.rstrip()
        whole = Prompt(put.text + continuation, put.regions, put.complete)
        before = Prompt(bare, tuple(r for r in put.regions if r.end <= len(bare)), put.complete)
        return tokenize(whole, self.tokenizer), len(tokenize(before, self.tokenizer))


class _Watched:
    """A condition that keeps what the attention was like."""

    def __init__(self, lm: ConditionedLM, owner: dict[int, Any]):
        self.lm = lm
        self.owner = owner
        """The request of every text, by the text's id; the texts live as long as this."""
        self.put: list[TokenizedPrompt] = []

    @property
    def name(self) -> str:
        return self.lm.condition.name

    def asked(self, prompt: TokenizedPrompt, tokenizer: Any) -> TokenizedPrompt:
        put = self.lm.condition.asked(prompt, tokenizer)
        self.owner[id(put)] = self.owner[id(prompt)]
        self.put.append(put)
        return put

    @contextmanager
    def block(
        self, model: Any, tokenizer: Any, batch: PaddedBatch, *, among: Any = None
    ) -> Iterator[None]:
        queries: Any = "last"
        if among is not None:
            last = among.sum(1) - 1
            queries = torch.from_numpy(np.arange(among.shape[1]) == last[:, None])
        with (
            self.lm.condition.block(model, tokenizer, batch, among=among),
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


def _settings(given: Mapping[str, Any]) -> tuple[int, float, tuple[str, ...]]:
    """Longest answer, temperature and ends; what would be passed over silently is refused."""
    said = dict(given)
    until = said.pop("until", None) or []
    until = (until,) if isinstance(until, str) else tuple(until)
    longest = said.pop("max_gen_toks", None) or said.pop("max_new_tokens", None) or LONGEST
    temperature = float(said.pop("temperature", 0.0) or 0.0)
    if not said.pop("do_sample", temperature > 0):
        temperature = 0.0
    for name, value in said.items():
        if value is not None and value not in _NEUTRAL.get(name, ()):
            raise InputError(
                f"the task sets {name}={value!r} for generation, which attnscope does not support; "
                "supported: until, max_gen_toks, do_sample, temperature",
                code="unsupported-argument",
                argument=name,
                value=value,
            )
    return int(longest), temperature, until


def ask(
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
    """One task of the harness, by its name or by its YAML file: its results, and the attention."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    lm = ConditionedLM(model, tokenizer, condition, batch=batch, seed=seed)
    file = Path(task)
    own = file.suffix in (".yaml", ".yml")
    if own and not file.is_file():
        raise InputError(
            f"there is no file {task}; give a YAML file of a task, or lm-eval:NAME",
            code="file-missing",
            path=task,
        )
    try:
        found = lm_eval.simple_evaluate(
            model=lm,
            tasks=[task],
            limit=problems,
            apply_chat_template=chat,
            bootstrap_iters=0,
            task_manager=TaskManager(include_defaults=not own),
        )
    except (KeyError, ValueError, FileNotFoundError) as error:
        raise InputError(
            f"lm-evaluation-harness refuses the task {task!r}: {error}",
            code="task-refused",
            task=task,
        ) from error
    return dict(found or {}), lm.attention


def scored(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for every metric and document: task, metric, problem, value, said; and the harness's
    own score of the metric."""
    rows = []
    for task, lines in results["samples"].items():
        for line in lines:
            for metric in line["metrics"]:
                value = line[metric]
                if not isinstance(value, bool | int | float | np.number):
                    continue  # what is a score over all documents only
                name = f"{metric},{line['filter']}"
                rows.append(
                    {
                        "task": task,
                        "metric": name,
                        "problem": line["doc_id"],
                        "value": float(value),
                        "said": _said(line["filtered_resps"]),
                        "score": float(results["results"][task][name]),
                    }
                )
    if not rows:
        raise InputError(
            "the task has no score per document, so conditions cannot be compared",
            code="no-document-scores",
        )
    return rows


def _said(answers: Sequence[Any]) -> str:
    return " | ".join(str(one) for one in answers)
