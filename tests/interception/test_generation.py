"""Each sequence of a generation is counted as if it had been generated alone."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
import transformers as hf

import attnscope
import oracle
from attnscope.errors import InputError, ScopeError
from families import VOCABULARY, build
from support_errors import raises

N, NEW = 11, 8
CLOSE = 1e-5
GREEDY = {"do_sample": False, "pad_token_id": 0}


class EndsAt(hf.StoppingCriteria):
    """Ends each sequence after a given number of new tokens."""

    def __init__(self, *new: int, prompt: int = N):
        self.ends, self.calls = torch.tensor(new) + prompt, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return input_ids.shape[1] >= self.ends


def prompts(batch: int = 2, length: int = N, padding: str = "") -> tuple[torch.Tensor, ...]:
    """Tokens and their mask; all but the first sequence are padded, the last one most."""
    ids, real = torch.randint(5, VOCABULARY, (batch, length)), torch.ones(batch, length).long()
    for b in range(1, batch):
        gone = slice(0, 2 + 2 * b) if padding == "left" else slice(length - 2 - 2 * b, length)
        real[b, gone] = 0 if padding else 1
    return ids * real, real


@torch.no_grad()
def each_alone(
    name: str, ids: torch.Tensor, real: torch.Tensor, places: torch.Tensor | None = None
) -> dict[int, torch.Tensor]:
    """Dense weights [B, H, K, K] of every sequence, run alone with eager attention, unpadded."""
    model = build(name, "eager")
    real = real.bool()
    B, K = ids.shape
    whole: dict[int, torch.Tensor] = {}
    for b in range(B):
        where = real[b].nonzero()[:, 0]
        more = {} if places is None else {"position_ids": places[b : b + 1, where]}
        out = model(ids[b : b + 1, where], output_attentions=True, **more)
        for layer, A in enumerate(out.attentions):
            into = whole.setdefault(layer, torch.zeros(B, A.shape[1], K, K))
            into[b][:, where[:, None], where] = A[0]
    return whole


def rows_of(queries: str, real: torch.Tensor, generated: torch.Tensor) -> torch.Tensor:
    """bool [B, K]: the queries that each value of `queries` selects."""
    prompt = real & ~generated
    last = torch.zeros_like(real)
    for b in range(len(real)):
        last[b, prompt[b].nonzero().max()] = True
    return {"all": real, "generated": generated, "last": last, "predicts": last | generated}[
        queries
    ]


def check(
    scope: Any,
    name: str,
    queries: str,
    ids: torch.Tensor,
    real: Any,
    generated: Any,
    places: torch.Tensor | None = None,
) -> None:
    """Compare a scope with every sequence run alone; `ids` are the tokens that were fed."""
    real, generated = real.bool(), generated.bool()
    counted = rows_of(queries, real, generated)
    assert scope.count(0).tolist() == counted.sum(1).tolist()
    oracle.compare(scope, each_alone(name, ids, real, places), real, counted, CLOSE)


QUERIES = ["all", "generated", "predicts", "last"]


# --- sequences that end early --------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("queries", QUERIES)
@torch.no_grad()
def test_a_sequence_that_ends_early(queries: str, padding: str) -> None:
    """A custom criterion ends it; ordinary tokens follow."""
    model, (ids, real) = build("qwen2"), prompts(3, padding=padding)
    ends, places = EndsAt(NEW, 3, 1), []
    model.model.register_forward_pre_hook(
        lambda _, args, given: places.append(given["position_ids"]), with_kwargs=True
    )
    with attnscope.watch(model, queries=queries) as scope:
        text = model.generate(
            ids, attention_mask=real, max_new_tokens=NEW, stopping_criteria=[ends], **GREEDY
        )
    assert ends.calls == NEW  # called once per decode step, as in an unwatched run
    fed = text[:, :-1]
    # A token that ends its sequence would not be fed, were the sequence alone in its batch.
    new = torch.arange(NEW - 1) < torch.tensor([[NEW - 1], [2], [0]])
    generated = torch.cat([torch.zeros_like(real).bool(), new], 1)
    # After padding on the right, `generate` counts on from the padding's places.
    places = torch.cat(places, 1)
    real = torch.cat([real.bool(), new], 1)
    check(scope, "qwen2", queries, fed, real, generated, places)


@pytest.mark.parametrize("backend", ["auto", "eager-fallback"])
@torch.no_grad()
def test_a_sequence_with_an_end_token(backend: str) -> None:
    model, (ids, real) = build("qwen2"), prompts()
    free = model.generate(ids, max_new_tokens=NEW, **GREEDY)[:, N:]
    step = next(s for s in range(1, NEW) if free[1, s] not in [*free[1, :s], *free[0]])
    settings = {"max_new_tokens": NEW, "eos_token_id": int(free[1, step]), **GREEDY}
    with attnscope.watch(model, queries="generated", backend=backend) as scope:
        text = model.generate(ids, attention_mask=real, **settings)
    assert scope.count(0).tolist() == [NEW - 1, step]
    fed = text[:, :-1]
    new = torch.arange(fed.shape[1]) < N + scope.count(0)[:, None]
    generated = new & (torch.arange(fed.shape[1]) >= N)
    check(scope, "qwen2", "generated", fed, new, generated)


@torch.no_grad()
def test_a_custom_decode_loop() -> None:
    """Without `generate`, the attention mask marks the sequences that have ended."""
    model, (ids, real) = build("qwen2"), prompts(padding="left")
    past, steps = hf.DynamicCache(config=model.config), torch.randint(5, VOCABULARY, (2, 4))
    alive = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    mask = torch.cat([real, alive], 1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with attnscope.watch(model, queries="predicts") as scope:
        model(ids, attention_mask=real, past_key_values=past, position_ids=places[:, :N])
        for s in range(4):
            upto = slice(None, N + s + 1)
            model(
                steps[:, s : s + 1],
                attention_mask=mask[:, upto],
                past_key_values=past,
                position_ids=places[:, N + s : N + s + 1],
            )
    fed = torch.cat([ids, steps], 1)
    generated = torch.cat([torch.zeros_like(real), alive], 1)
    check(scope, "qwen2", "predicts", fed, mask, generated)


# --- chunked prefill -----------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [4, 5, 10, 64])  # pieces of 4 4 3, 5 5 1, 10 1, 11
@pytest.mark.parametrize("queries", QUERIES)
@torch.no_grad()
def test_chunked_prefill(queries: str, chunk: int) -> None:
    model, (ids, real) = build("qwen2"), prompts(3, padding="left")
    with attnscope.watch(model, queries=queries) as scope:
        text = model.generate(
            ids, attention_mask=real, max_new_tokens=4, prefill_chunk_size=chunk, **GREEDY
        )
    fed = text[:, :-1]
    mask = torch.cat([real, torch.ones(3, 3).long()], 1)
    check(scope, "qwen2", queries, fed, mask, (torch.arange(N + 3) >= N).expand(3, -1))


@pytest.mark.parametrize("name", ["qwen2", "gpt-oss", "bloom"])
@pytest.mark.parametrize("queries", ["last", "predicts"])
@torch.no_grad()
def test_the_last_token_in_chunked_prefill(queries: str, name: str) -> None:
    """With right padding, the last token of the second sequence is in an earlier chunk."""
    model, (ids, real) = build(name), prompts(padding="right")
    real[1] = torch.arange(N) < 4
    past = hf.DynamicCache(config=model.config)
    with attnscope.watch(model, queries=queries, keep=True) as scope:
        for first, stop in ((0, 6), (6, 9), (9, N)):
            model(ids[:, first:stop], attention_mask=real[:, :stop], past_key_values=past)
            counted = rows_of("last", real[:, :stop].bool(), torch.zeros(2, stop).bool())
            assert scope.count(0).tolist() == [1, 1]
            found = scope.query_positions(0)
            assert sorted(found[found >= 0].tolist()) == sorted(counted.nonzero()[:, 1].tolist())
    check(scope, name, queries, ids, real, torch.zeros_like(real))


# --- several turns -------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("queries", QUERIES)
@torch.no_grad()
def test_two_turns_on_one_cache(queries: str, cache: str) -> None:
    """The next user turn is not generated. Neither is the last token of a completion, which is
    fed together with it."""
    model, (ids, _) = build("qwen2"), prompts(1)
    past = (
        hf.DynamicCache(config=model.config)
        if cache == "dynamic"
        else hf.StaticCache(config=model.config, max_cache_len=40)
    )
    with attnscope.watch(model, queries=queries) as scope:
        text = model.generate(ids, past_key_values=past, max_new_tokens=4, **GREEDY)
        more = torch.cat([text, torch.randint(5, VOCABULARY, (1, 5))], 1)
        text = model.generate(more, past_key_values=past, max_new_tokens=3, **GREEDY)
    fed = text[:, :-1]
    place = torch.arange(fed.shape[1])
    generated = ((place >= N) & (place < N + 3)) | (place >= N + 9)
    real = torch.ones_like(fed)
    if queries == "predicts":  # of both turns, what their first tokens were predicted from
        counted = generated | (place == N - 1) | (place == N + 8)
        assert scope.count(0).tolist() == [7]
        oracle.compare(scope, each_alone("qwen2", fed, real), real.bool(), counted[None], CLOSE)
    else:
        check(scope, "qwen2", queries, fed, real, generated[None])


@torch.no_grad()
def test_a_turn_of_one_token_that_was_never_fed() -> None:
    """A completion of one token has no generated query, but the query that predicted it counts."""
    model, (ids, _), past = build("qwen2"), prompts(1), None
    past = hf.DynamicCache(config=model.config)
    with attnscope.watch(model, queries="predicts") as scope:
        text = model.generate(ids, past_key_values=past, max_new_tokens=1, **GREEDY)
        assert scope.count(0).tolist() == [1]
        more = torch.cat([text, torch.randint(5, VOCABULARY, (1, 3))], 1)
        model.generate(more, past_key_values=past, max_new_tokens=1, **GREEDY)
    place = torch.arange(more.shape[1])
    counted = ((place == N - 1) | (place == more.shape[1] - 1))[None]
    real = torch.ones_like(more)
    oracle.compare(scope, each_alone("qwen2", more, real), real.bool(), counted, CLOSE)


@torch.no_grad()
def test_a_users_turn_after_generate() -> None:
    """Outside `generate`, several tokens are a prompt, and one token is a decode step."""
    model, (ids, _) = build("qwen2"), prompts(1)
    past = hf.DynamicCache(config=model.config)
    more = torch.randint(5, VOCABULARY, (1, 6))
    with attnscope.watch(model, queries="generated") as scope:
        text = model.generate(ids, past_key_values=past, max_new_tokens=4, **GREEDY)
        for part in more.split([4, 1, 1], dim=1):
            model(part, past_key_values=past)
    fed = torch.cat([text[:, :-1], more], 1)
    place = torch.arange(fed.shape[1])
    generated = ((place >= N) & (place < N + 3)) | (place >= N + 7)
    check(scope, "qwen2", "generated", fed, torch.ones_like(fed), generated[None])


# --- caches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@torch.no_grad()
def test_sliding_caches(name: str, cache: str, chunk: int | None) -> None:
    model, (ids, real) = build(name), prompts(padding="left")
    for queries in QUERIES:
        with attnscope.watch(model, queries=queries) as scope:
            text = model.generate(
                ids,
                attention_mask=real,
                max_new_tokens=NEW,
                cache_implementation=cache,
                prefill_chunk_size=chunk,
                stopping_criteria=[EndsAt(4, NEW)],
                **GREEDY,
            )
        fed = text[:, :-1]
        new = torch.arange(NEW - 1) < torch.tensor([[3], [NEW - 1]])
        generated = torch.cat([torch.zeros_like(real).bool(), new], 1)
        check(scope, name, queries, fed, torch.cat([real.bool(), new], 1), generated)


@pytest.mark.parametrize("queries", QUERIES)
@torch.no_grad()
def test_without_a_cache(queries: str) -> None:
    """Each decode step runs the whole text again; the last one is measured."""
    model, (ids, real) = build("qwen2"), prompts(padding="left")
    with attnscope.watch(model, queries=queries) as scope:
        text = model.generate(
            ids,
            attention_mask=real,
            max_new_tokens=5,
            use_cache=False,
            stopping_criteria=[EndsAt(5, 2)],
            **GREEDY,
        )
    new = torch.arange(4) < torch.tensor([[4], [1]])
    generated = torch.cat([torch.zeros_like(real).bool(), new], 1)
    check(scope, "qwen2", queries, text[:, :-1], torch.cat([real.bool(), new], 1), generated)


# --- a custom query mask -------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [N, N + 2, N + NEW - 1, N + NEW + 20])
@torch.no_grad()
def test_a_query_mask_may_be_shorter_or_longer_than_the_text(wide: int) -> None:
    model, (ids, real) = build("qwen2"), prompts()
    mask = torch.rand(2, wide) < 0.6
    mask[:, 3] = True
    with attnscope.watch(model, queries=mask) as scope:
        text = model.generate(ids, max_new_tokens=NEW, stopping_criteria=[EndsAt(NEW, 4)], **GREEDY)
    new = torch.arange(NEW - 1) < torch.tensor([[NEW - 1], [3]])
    real = torch.cat([real.bool(), new], 1)
    counted = torch.zeros_like(real)
    counted[:, : mask.shape[1]] = mask[:, : real.shape[1]]
    weights = each_alone("qwen2", text[:, :-1], real)
    oracle.compare(scope, weights, real, counted & real, CLOSE)


# --- what cannot be counted is refused -----------------------------------------------------------


def test_beam_search_is_refused_before_it_runs() -> None:
    model, (ids, _) = build("qwen2"), prompts()
    ran: list[int] = []
    model.model.register_forward_pre_hook(lambda *_: ran.append(1))
    refused = raises(ScopeError, "beam-search", num_beams=2)
    with refused, attnscope.watch(model):
        model.generate(ids, num_beams=2, max_new_tokens=4, **GREEDY)
    assert not ran


@pytest.mark.parametrize("use_cache", [True, False])
def test_guidance_is_refused(use_cache: bool) -> None:
    """Its second sequence could be mistaken for the first one."""
    model, (ids, _) = build("qwen2"), prompts(1)
    refused = raises(ScopeError, "second-sequence")
    with refused, attnscope.watch(model):
        model.generate(
            ids,
            negative_prompt_ids=ids.flip(1),
            guidance_scale=1.5,
            max_new_tokens=4,
            use_cache=use_cache,
            **GREEDY,
        )


# --- other models and threads --------------------------------------------------------------------


@torch.no_grad()
def test_a_part_of_the_model_is_watched() -> None:
    model, (ids, _) = build("qwen2"), prompts()
    settings = {"max_new_tokens": NEW, "stopping_criteria": [EndsAt(NEW, 3)], **GREEDY}
    with attnscope.watch(model.model, queries="generated") as scope:
        model.generate(ids, **settings)
    assert scope.count(0).tolist() == [NEW - 1, 2]


@torch.no_grad()
def test_the_generation_of_another_model_is_not_counted() -> None:
    model, other, (ids, _) = build("qwen2"), build("llama"), prompts()
    past = hf.DynamicCache(config=model.config)
    settings = {"max_new_tokens": 5, **GREEDY}
    with (
        attnscope.watch(model, queries="generated") as scope,
        attnscope.watch(other, queries="generated") as beside,
    ):
        model(ids, past_key_values=past)
        other.generate(ids, stopping_criteria=[EndsAt(2, 5)], **settings)
        model(ids[:, :3], past_key_values=past)
        model(ids[:, :1], past_key_values=past)
    assert scope.count(0).tolist() == [1, 1]
    assert beside.count(0).tolist() == [1, 4]


def test_generate_is_restored() -> None:
    mixin = hf.GenerationMixin
    before = mixin.generate, mixin._get_stopping_criteria
    model, other, (ids, _) = build("qwen2"), build("llama"), prompts()
    first, second = attnscope.watch(model), attnscope.watch(other)
    first.__enter__()
    second.__enter__()
    assert mixin.generate is not before[0]
    first.__exit__(None, None, None)
    other.generate(ids, max_new_tokens=2, **GREEDY)
    second.__exit__(None, None, None)
    assert (mixin.generate, mixin._get_stopping_criteria) == before


@torch.no_grad()
def test_a_generation_that_raises_has_ended() -> None:
    """Passes after it count as passes outside `generate`."""

    class Breaks(EndsAt):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if self.calls == 2:
                raise ZeroDivisionError
            return super().__call__(input_ids, scores, **kwargs)

    model, (ids, _) = build("qwen2"), prompts()
    with attnscope.watch(model, queries="generated") as scope:
        with pytest.raises(ZeroDivisionError):
            model.generate(ids, max_new_tokens=6, stopping_criteria=[Breaks(6, 6)], **GREEDY)
        past = hf.DynamicCache(config=model.config)
        for part in ids.split([8, 2, 1], dim=1):
            model(part, past_key_values=past)
    assert scope.count(0).tolist() == [1, 1]


@torch.no_grad()
def test_a_watch_without_a_pass_in_its_thread() -> None:
    """`generate` runs in another thread, as with a streamer."""
    model, completions = build("qwen2"), []

    def generate() -> None:
        completions.append(model.generate(torch.arange(5, 12)[None], max_new_tokens=2))

    with attnscope.watch(model) as scope:
        thread = threading.Thread(target=generate)
        thread.start()
        thread.join()
    assert len(completions) == 1
    with raises(ScopeError, "no-forward-pass"):
        scope.received(0)


def test_a_generation_in_another_thread_is_not_counted() -> None:
    model, other, (ids, _) = build("qwen2"), build("qwen2"), prompts()
    with attnscope.watch(model, queries="generated") as scope:
        thread = threading.Thread(
            target=other.generate, args=(ids,), kwargs={"max_new_tokens": 3, **GREEDY}
        )
        thread.start()
        model.generate(ids, max_new_tokens=4, **GREEDY)
        thread.join()
    assert scope.count(0).tolist() == [3, 3]


# --- copies and repr of scopes -------------------------------------------------------------------


@pytest.mark.parametrize("queries", ["all", "predicts"])
@torch.no_grad()
def test_a_scope_can_be_pickled_and_copied(queries: str) -> None:
    model, (ids, real) = build("gpt-oss"), prompts(padding="left")
    with attnscope.watch(model, queries=queries, keep=True) as scope:
        model.generate(ids, attention_mask=real, max_new_tokens=3, **GREEDY)
    for copied in (pickle.loads(pickle.dumps(scope)), copy.deepcopy(scope)):
        for what in ("received", "average", "uniform", "eligible", "entropy", "distance", "count"):
            mine, theirs = getattr(scope, what)(1), getattr(copied, what)(1)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(copied.largest(1, 2).key, scope.largest(1, 2).key)


@pytest.mark.wording
@torch.no_grad()
def test_the_repr_of_a_scope() -> None:
    model, (ids, _) = build("qwen2"), prompts()
    with attnscope.watch(model, queries="generated") as scope:
        assert repr(scope).endswith("no forward pass yet>")
        model.generate(ids, max_new_tokens=NEW, stopping_criteria=[EndsAt(NEW, 3)], **GREEDY)
    assert repr(scope) == (
        "<Scope of 3 layers, queries 'generated', 'streaming': "
        "2 sequences of 18 keys, 7, 2 queries counted>"
    )


@torch.no_grad()
def test_eligible_counts_are_of_the_last_pass() -> None:
    """Not of an earlier pass at the same memory address."""
    model = build("qwen2")
    with attnscope.watch(model) as scope:
        for length in (9, 9, 9, 9):
            real = torch.ones(1, length).long()
            real[:, : int(torch.randint(0, 6, ()))] = 0
            model(torch.randint(5, VOCABULARY, (1, length)), attention_mask=real)
            wanted = torch.where(real.bool(), real.flip(1).cumsum(1).flip(1), 0)
            assert scope.eligible(0).tolist() == wanted.tolist()


def test_no_token_was_fed_back() -> None:
    model, (ids, _) = build("qwen2"), prompts()
    with attnscope.watch(model, queries="generated") as scope:
        model.generate(ids, max_new_tokens=1, **GREEDY)
    with raises(ScopeError, "no-query-counted", queries="generated"):
        scope.received(0)
    with raises(InputError, "unknown-layer", value=7):
        scope.received(7)
