"""vLLM's engine core in this process, driven step by step by the thread that owns it."""

import gc
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

from vllm import LLMEngine, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from agentrl.engines.vllm.reply import Span, action_of, scores_of
from agentrl.engines.worker import settle
from agentrl.errors import EngineFault
from agentrl.types import ActionTokens


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt for vLLM, what to make of its output, and who waits for that."""

    prompt: list[int]
    params: SamplingParams
    read: Callable[[RequestOutput], Any]
    future: "Future[Any]"


def final_params(fields: Mapping[str, Any]) -> SamplingParams:
    """A request's fields as vLLM's own type; the answer comes in one piece at the end."""
    return SamplingParams(**fields, output_kind=RequestOutputKind.FINAL_ONLY)


class VllmStepper:
    """A `Stepper` around `vllm.LLMEngine`; vLLM itself queues what exceeds its places."""

    def __init__(self, arguments: Mapping[str, Any], *, version: int) -> None:
        self.llm = LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=False)
        self.set_version(version)
        self.held = False
        self.waiting: deque[Request] = deque()
        self._running: dict[str, Request] = {}
        self._numbers = count()

    @property
    def running(self) -> Mapping[str, Request]:
        """The requests that vLLM has, by their name there."""
        return self._running

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._running) or (bool(self.waiting) and not self.held)

    def step(self) -> None:
        """Hand over what waits, sample one token for every row, answer what has ended."""
        while self.waiting and not self.held:
            self._admit(self.waiting.popleft())
        if not self._running:
            return
        for output in self.llm.step():
            request = self._running.pop(output.request_id, None)
            if request is not None and isinstance(output, RequestOutput):
                self._answer(request, output)

    def forget(self, future: "Future[Any]") -> None:
        """Drop the request behind a cancelled future and free its place."""
        self.waiting = deque(r for r in self.waiting if r.future is not future)
        for name, request in self._running.items():
            if request.future is future:
                self.llm.abort_request([name])
                del self._running[name]
                return

    def set_version(self, version: int) -> None:
        """What vLLM notes beside every token that it samples from now on."""
        self.llm.set_weight_version(str(version))

    def forget_prefixes(self) -> None:
        """Drop every key and value; running requests are prefilled again from their ids."""
        self.llm.reset_prefix_cache(reset_running_requests=True)

    def close(self) -> None:
        """Free the model and its cache.

        Not by vLLM's own shutdown, which also destroys every process group of this process: those
        of a learner and of other engines.
        """
        client: Any = self.llm.engine_core
        client._finalizer.detach()
        self.llm.model_executor.shutdown()
        client.engine_core.scheduler.shutdown()
        gc.unfreeze()

    def _admit(self, request: Request) -> None:
        if request.future.cancelled():
            return
        name = str(next(self._numbers))
        try:
            self.llm.add_request(name, {"prompt_token_ids": request.prompt}, request.params)
        except ValueError as error:
            reason = " ".join(str(error).split())
            settle(request.future, error=EngineFault(f"vLLM refused a request: {reason}"))
        else:
            self._running[name] = request

    def _answer(self, request: Request, output: RequestOutput) -> None:
        try:
            result = request.read(output)
        except Exception as error:
            settle(request.future, error=error)
        else:
            settle(request.future, result)


def read_action(output: RequestOutput) -> ActionTokens:
    """What was sampled. Raises EngineFault if it doesn't add up."""
    sampled = output.outputs[0]
    pairs = zip(sampled.token_ids, sampled.logprobs or (), strict=False)
    return action_of(
        sampled.token_ids,
        [(token, entry[token].logprob) for token, entry in pairs if entry and token in entry],
        [Span(s.version, s.start, s.end) for s in sampled.weight_versions or ()],
        sampled.finish_reason,
    )


def read_scores(output: RequestOutput) -> list[float]:
    """The logprobs (nats) of the prompt's own ids after the first."""
    entries = output.prompt_logprobs or ()
    return scores_of(
        output.prompt_token_ids or (),
        [{token: scored.logprob for token, scored in (e or {}).items()} for e in entries],
    )
