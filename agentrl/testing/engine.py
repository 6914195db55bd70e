"""What every inference engine must hold, as plain async checks.

A test module brings an `EngineKit` and runs each of `ENGINE_CHECKS` with it; `PUBLISH_CHECKS`
are for engines that take new weights. A check raises AssertionError with what it saw.
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from agentrl.errors import EngineFault
from agentrl.protocols import InferenceEngine, Learner, WeightSync
from agentrl.types import ActionTokens, Sampling

LIMIT_S = 60.0
"""Nothing here takes longer unless something hangs."""


class OpenEngine(Protocol):
    """Opens a fresh engine that serves the kit's `before` weights."""

    def __call__(
        self, *, max_concurrent: int, context_tokens: int
    ) -> AbstractAsyncContextManager[InferenceEngine]:
        """An open engine; closed when the context ends."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKit:
    """What the checks need of an engine's builder.

    `before` and `after` hold different weights of one architecture; their `logprobs` must be a
    plain forward over the whole sequence. `open_fixed` serves a model whose next-token logits
    are the given numbers after any prompt (ids 0 … n-1, the rest of the vocabulary out of
    reach). `open_broken` serves one whose forward pass raises. `tolerance` is in nats.
    """

    open: OpenEngine
    open_fixed: Callable[[Sequence[float]], AbstractAsyncContextManager[InferenceEngine]]
    open_broken: Callable[[], AbstractAsyncContextManager[InferenceEngine]]
    sync: Callable[[InferenceEngine], WeightSync]
    before: Learner
    after: Learner
    vocab_size: int
    tolerance: float = 1e-4


EngineCheck = Callable[[EngineKit], Awaitable[None]]


async def logprobs_are_those_of_a_full_forward(kit: EngineKit) -> None:
    """Rows of many lengths decode together, and each is scored as if it were alone."""
    async with _engine(kit) as engine:
        for temperature in (1.0, 0.7, 1.6):
            prompts = [_prompt(kit, n, seed=n) for n in (1, 2, 7, 20, 33, 64, 65)]
            actions = await asyncio.gather(
                *(
                    engine.sample(
                        p, _sampling(12, temperature=temperature, seed=len(p)), session=f"s{len(p)}"
                    )
                    for p in prompts
                )
            )
            for prompt, action in zip(prompts, actions, strict=True):
                assert all(0 <= i < kit.vocab_size for i in action.token_ids)
                _scored_by(kit.before, prompt, action, temperature, kit.tolerance)


async def finish_says_why(kit: EngineKit) -> None:
    """Stop ids are a set, a sampled one is kept, and one at the last allowed place still counts."""
    async with _engine(kit) as engine:
        prompt = _prompt(kit, 9)
        free = await engine.sample(prompt, _sampling(16), session="a")
        assert free.finish == "length" and len(free.token_ids) == 16, free
        stop = free.token_ids[7]
        place = free.token_ids.index(stop)
        unused = next(i for i in range(kit.vocab_size) if i not in free.token_ids)
        for stops in (
            {stop},
            {stop, unused},
            {stop, unused, *range(20, 40)} - {*free.token_ids[:place]},
        ):
            cut = await engine.sample(prompt, _sampling(16, stop_ids=frozenset(stops)), session="b")
            assert cut.finish == "stop" and cut.token_ids == free.token_ids[: place + 1], (
                stops,
                cut,
            )
        last = _sampling(place + 1, stop_ids=frozenset({stop}))
        assert (await engine.sample(prompt, last, session="c")).finish == "stop"
        never = await engine.sample(
            prompt, _sampling(16, stop_ids=frozenset({unused})), session="d"
        )
        assert never.finish == "length" and never.token_ids == free.token_ids, never


async def a_seed_repeats_whatever_is_in_flight(kit: EngineKit) -> None:
    """The same seed draws the same ids alone, in company, and beside its own twin."""
    async with _engine(kit) as engine:
        prompt = _prompt(kit, 11)
        alone = await engine.sample(prompt, _sampling(24, seed=5), session="alone")
        company = [
            engine.sample(_prompt(kit, 5 + n, seed=n), _sampling(30, seed=n), session=f"o{n}")
            for n in range(6)
        ]
        twin = engine.sample(prompt, _sampling(24, seed=5), session="twin")
        other = engine.sample(prompt, _sampling(24, seed=6), session="other")
        *_, same, different = await asyncio.gather(*company, twin, other)
        assert same.token_ids == alone.token_ids, (alone, same)
        assert different.token_ids != alone.token_ids, "another seed drew the same ids"
        _near(same.logprobs, alone.logprobs, kit.tolerance)
        huge = await engine.sample(prompt, _sampling(4, seed=2**70 + 1), session="huge")
        assert len(huge.token_ids) == 4
        below = await engine.sample(prompt, _sampling(4, seed=-3), session="below")
        assert len(below.token_ids) == 4


async def the_context_cuts_an_action_and_refuses_a_prompt(kit: EngineKit) -> None:
    """What fits is sampled with finish "length"; a prompt without room is one clear ValueError."""
    async with _engine(kit, context_tokens=32) as engine:
        action = await engine.sample(_prompt(kit, 27), _sampling(20), session="a")
        assert action.finish == "length" and len(action.token_ids) == 5, action
        _scored_by(kit.before, _prompt(kit, 27), action, 1.0, kit.tolerance)
        for bad in (_prompt(kit, 32), _prompt(kit, 40), (), (kit.vocab_size,), (-1,)):
            try:
                await engine.sample(bad, _sampling(4), session="b")
            except ValueError as error:
                assert "\n" not in str(error), error
            else:
                raise AssertionError(f"a prompt of {len(bad)} ids in 32 was taken")
        again = await engine.sample(_prompt(kit, 31), _sampling(20), session="a")
        assert again.finish == "length" and len(again.token_ids) == 1, again


async def cancelling_frees_the_place(kit: EngineKit) -> None:
    """With all places taken by long requests, cancelling one lets the next in line run."""
    async with _engine(kit, max_concurrent=2, context_tokens=1024) as engine:
        long = [
            asyncio.ensure_future(engine.sample(_prompt(kit, 4), _sampling(1000), session=f"l{n}"))
            for n in range(2)
        ]
        queued = asyncio.ensure_future(engine.sample(_prompt(kit, 5), _sampling(9), session="q"))
        short = asyncio.ensure_future(engine.sample(_prompt(kit, 6), _sampling(3), session="s"))
        await asyncio.sleep(0.05)
        assert not short.done(), "a request ran beside as many as the engine has places"
        queued.cancel()
        long[0].cancel()
        assert len((await short).token_ids) == 3
        assert not long[1].done(), "the other request ended early"
        long[1].cancel()
        ended = await asyncio.gather(*long, queued, return_exceptions=True)
        assert all(isinstance(e, asyncio.CancelledError) for e in ended), ended
        after = await engine.sample(_prompt(kit, 6), _sampling(3), session="l0")
        _scored_by(kit.before, _prompt(kit, 6), after, 1.0, kit.tolerance)


async def a_kept_prefix_changes_nothing(kit: EngineKit) -> None:
    """Later turns, also after an edit of history, equal those of an engine that never met them."""
    async with _engine(kit) as warm:
        history = list(_prompt(kit, 17))
        for turn in range(4):
            action = await warm.sample(history, _sampling(8, seed=turn), session="episode")
            async with _engine(kit) as cold:
                fresh = await cold.sample(history, _sampling(8, seed=turn), session="x")
            assert action.token_ids == fresh.token_ids, (turn, action, fresh)
            _near(action.logprobs, fresh.logprobs, kit.tolerance)
            _scored_by(kit.before, history, action, 1.0, kit.tolerance)
            history += [*action.token_ids, *_prompt(kit, 5 + turn, seed=turn)]
        edited = history[:20] + history[23:]
        action = await warm.sample(edited, _sampling(8), session="episode")
        _scored_by(kit.before, edited, action, 1.0, kit.tolerance)


async def more_requests_than_places_all_come(kit: EngineKit) -> None:
    """They wait in line, displace each other's prefixes, and none is changed by that."""
    async with _engine(kit, max_concurrent=3) as engine:

        async def episode(number: int) -> None:
            shared = _prompt(kit, 40, seed=number // 4)
            history = list(shared)
            for turn in range(3):
                sampling = _sampling(3 + number % 5, seed=10 * number + turn)
                action = await engine.sample(history, sampling, session=f"e{number}")
                assert len(action.token_ids) == sampling.max_tokens
                _scored_by(kit.before, history, action, 1.0, kit.tolerance)
                history += [*action.token_ids, *_prompt(kit, 2 + number, seed=number)]

        await asyncio.gather(*(episode(n) for n in range(12)))


async def logprobs_are_after_temperature(kit: EngineKit) -> None:
    """Logits 3, 1, 0 at temperature 0.5: token 0 has -0.02058, and greedy is scored at 1."""
    async with _within(kit.open_fixed((3.0, 1.0, 0.0))) as engine:
        seen = await _pairs(engine, _sampling(40, temperature=0.5))
        wanted = _log_softmax((6.0, 2.0, 0.0))
        assert abs(wanted[0] + 0.02058) < 1e-5
        for token, logprob in seen:
            assert abs(logprob - wanted[token]) < 1e-5, (token, logprob, wanted)
        greedy = await _pairs(engine, _sampling(5, temperature=0.0))
        assert all(t == 0 and abs(p + 0.16985) < 1e-5 for t, p in greedy), greedy


async def truncated_sampling_renormalises(kit: EngineKit) -> None:
    """Probabilities .5, .3, .2: top_p .79 or top_k 2 keep two tokens, and token 0 has -0.4700.

    (At top_p .8 itself rounding decides.)
    """
    logits = tuple(math.log(p) for p in (0.5, 0.3, 0.2))
    async with _within(kit.open_fixed(logits)) as engine:
        two = (math.log(0.5 / 0.8), math.log(0.3 / 0.8))
        assert abs(two[0] + 0.4700) < 1e-4
        for sampling in (_sampling(60, top_p=0.79), _sampling(60, top_k=2)):
            seen = await _pairs(engine, sampling)
            assert {token for token, _ in seen} == {0, 1}, seen
            for token, logprob in seen:
                assert abs(logprob - two[token]) < 1e-5, (token, logprob)
        for sampling in (_sampling(9, top_p=1e-9), _sampling(9, top_k=1)):
            one = await _pairs(engine, sampling)
            assert all(t == 0 and abs(p) < 1e-5 for t, p in one), one
        mixed = await asyncio.gather(
            _pairs(engine, _sampling(40, top_k=2)), _pairs(engine, _sampling(40, seed=1))
        )
        assert {t for t, _ in mixed[0]} == {0, 1} and {t for t, _ in mixed[1]} == {0, 1, 2}


async def draws_follow_the_distribution(kit: EngineKit) -> None:
    """Frequencies over many seeds and places stay within five standard deviations."""
    probabilities = (0.6, 0.25, 0.1, 0.05)
    async with _within(kit.open_fixed(tuple(math.log(p) for p in probabilities))) as engine:
        drawn = await asyncio.gather(
            *(_pairs(engine, _sampling(50, seed=n), session=f"s{n}") for n in range(32))
        )
        counts = Counter(token for pairs in drawn for token, _ in pairs)
        total = counts.total()
        for token, p in enumerate(probabilities):
            deviation = abs(counts[token] - total * p) / math.sqrt(total * p * (1 - p))
            assert deviation < 5, f"token {token} drawn {counts[token]} times of {total}"


async def released_waits_and_holds(kit: EngineKit) -> None:
    """Inside, nothing runs: what ran has ended, what is new waits and then is answered right."""
    async with _engine(kit, context_tokens=1024) as engine:
        running = asyncio.ensure_future(engine.sample(_prompt(kit, 9), _sampling(900), session="a"))
        await asyncio.sleep(0.2)  # surely begun; if it has ended already, half the check is left
        async with engine.released():
            assert running.done(), "a request was running while the engine was released"
            new = asyncio.ensure_future(engine.sample(_prompt(kit, 8), _sampling(5), session="a"))
            await asyncio.sleep(0.1)
            assert not new.done(), "a request ran while the engine was released"
        _scored_by(kit.before, _prompt(kit, 8), await new, 1.0, kit.tolerance)


async def a_failure_reaches_everyone(kit: EngineKit) -> None:
    """A raising model is an EngineFault for each who waits, at once and ever after."""
    async with _within(kit.open_broken()) as engine:
        for _ in range(2):
            waiting = (engine.sample((1, 2), _sampling(4), session=f"s{n}") for n in range(5))
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(o, EngineFault) for o in outcomes), outcomes


async def closing_answers_everyone(kit: EngineKit) -> None:
    """Requests in flight or in line end with an EngineFault, as do later ones."""
    async with _engine(kit, max_concurrent=1, context_tokens=1024) as engine:
        waiting = [
            asyncio.ensure_future(engine.sample((1, 2), _sampling(1000), session=f"s{n}"))
            for n in range(3)
        ]
        await asyncio.sleep(0.02)
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(o, EngineFault) for o in outcomes), outcomes
    try:
        await engine.sample((1, 2), _sampling(1), session="late")
    except EngineFault:
        return
    raise AssertionError("a closed engine took a request")


async def publishing_changes_what_is_served(kit: EngineKit) -> None:
    """After a publish tokens carry the new version and the new weights' logprobs, no old prefix."""
    async with _engine(kit) as engine:
        sync = kit.sync(engine)
        await sync.publish(kit.before)
        history = list(_prompt(kit, 40))
        old = await engine.sample(history, _sampling(8), session="e")
        assert set(old.versions) == {kit.before.version}, old
        _scored_by(kit.before, history, old, 1.0, kit.tolerance)
        await sync.publish(kit.after)
        assert engine.version == kit.after.version
        new = await engine.sample(history, _sampling(8), session="e")
        assert set(new.versions) == {kit.after.version}, new
        _scored_by(kit.after, history, new, 1.0, kit.tolerance)
        assert new.logprobs != old.logprobs
        history += [*new.token_ids, *_prompt(kit, 6)]
        later = await engine.sample(history, _sampling(8), session="e")
        _scored_by(kit.after, history, later, 1.0, kit.tolerance)


async def versions_are_per_token(kit: EngineKit) -> None:
    """An action that lives across a publish says for each token which weights sampled it."""
    async with _engine(kit, context_tokens=1024) as engine:
        sync = kit.sync(engine)
        await sync.publish(kit.before)
        sampling = _sampling(400)
        running = asyncio.ensure_future(engine.sample(_prompt(kit, 9), sampling, session="e"))
        await asyncio.sleep(0.1)
        await sync.publish(kit.after)
        action = await running
        order = [kit.before.version, kit.after.version]
        assert list(action.versions) == sorted(action.versions, key=order.index), action.versions
        assert action.versions[-1] == kit.after.version, "the action ended before the publish"


ENGINE_CHECKS: tuple[EngineCheck, ...] = (
    logprobs_are_those_of_a_full_forward,
    finish_says_why,
    a_seed_repeats_whatever_is_in_flight,
    the_context_cuts_an_action_and_refuses_a_prompt,
    cancelling_frees_the_place,
    a_kept_prefix_changes_nothing,
    more_requests_than_places_all_come,
    logprobs_are_after_temperature,
    truncated_sampling_renormalises,
    draws_follow_the_distribution,
    released_waits_and_holds,
    a_failure_reaches_everyone,
    closing_answers_everyone,
)

PUBLISH_CHECKS: tuple[EngineCheck, ...] = (
    publishing_changes_what_is_served,
    versions_are_per_token,
)


@asynccontextmanager
async def _within(
    opening: AbstractAsyncContextManager[InferenceEngine],
) -> AsyncGenerator[InferenceEngine]:
    async with asyncio.timeout(LIMIT_S), opening as engine:
        yield engine


def _engine(
    kit: EngineKit, *, max_concurrent: int = 8, context_tokens: int = 160
) -> AbstractAsyncContextManager[InferenceEngine]:
    return _within(kit.open(max_concurrent=max_concurrent, context_tokens=context_tokens))


_FREE = Sampling(max_tokens=1, stop_ids=frozenset())


def _sampling(
    max_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    seed: int = 0,
) -> Sampling:
    shape = replace(_FREE, temperature=temperature, top_p=top_p, top_k=top_k)
    return replace(shape, max_tokens=max_tokens, stop_ids=stop_ids, seed=seed)


def _prompt(kit: EngineKit, length: int, seed: int = 0) -> tuple[int, ...]:
    """Ids that look random and repeat: a linear congruence on `seed`."""
    state, ids = seed * 7919 + 12345, list[int]()
    for _ in range(length):
        state = (state * 1103515245 + 12345) % 2**31
        ids.append((state >> 8) % kit.vocab_size)
    return tuple(ids)


async def _pairs(
    engine: InferenceEngine, sampling: Sampling, session: str = "s"
) -> list[tuple[int, float]]:
    action = await engine.sample((0, 1), sampling, session=session)
    assert action.logprobs is not None
    return list(zip(action.token_ids, action.logprobs, strict=True))


def _scored_by(
    learner: Learner,
    prompt: Sequence[int],
    action: ActionTokens,
    temperature: float,
    tolerance: float,
) -> None:
    scores = learner.logprobs([*prompt, *action.token_ids], temperature)
    _near(action.logprobs, scores[len(prompt) - 1 :], tolerance)


def _near(got: Sequence[float] | None, wanted: Sequence[float] | None, tolerance: float) -> None:
    assert got is not None and wanted is not None, "logprobs are missing"
    gap = max(abs(a - b) for a, b in zip(got, wanted, strict=True))
    assert gap < tolerance, f"logprobs differ by up to {gap:.3g} nats (at most {tolerance})"


def _log_softmax(logits: Sequence[float]) -> list[float]:
    total = math.log(sum(math.exp(x) for x in logits))
    return [x - total for x in logits]
