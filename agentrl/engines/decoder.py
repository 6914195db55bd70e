"""Continuous batching: a table of slots, and the steps that move every running row by one token.

Each slot holds one sequence: `tokens[s, :total[s]]` are its ids and the first `cached[s]` of them
have keys and values in the pool. A running slot is prefilled while `cached < total - 1`; after
that one decode step takes its last id and appends a sampled one. An idle slot keeps its cached
ids until another session needs the place. Nothing here is thread-safe: one thread owns it.
"""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.engines.kv_cache import ATTENTION, SPAN_STEP, SlotCache, Window, rows_of
from agentrl.engines.sampling import draw, longest_common_prefix, processed_logprobs, uniforms
from agentrl.engines.worker import settle
from agentrl.errors import EngineFault
from agentrl.types import ActionTokens, Finish, Sampling

Ids = NDArray[np.int64]

WORTH_SHARING = 16
"""Tokens that a prefix must save before a row waits for it or copies it."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One action to sample: where it goes on, how, and who waits for it.

    `max_tokens` is already cut to what fits the context.
    """

    prompt: Ids
    sampling: Sampling
    max_tokens: int
    session: str
    future: "Future[ActionTokens]"


class Decoder:
    """Owns the model, the pool and the slots; `step` is one turn of continuous batching."""

    def __init__(
        self, model: PreTrainedModel, *, slots: int, context_tokens: int, prefill_tokens: int
    ) -> None:
        model.set_attn_implementation(ATTENTION)
        self.model = model
        self.version = 0
        self.held = False
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self._prefill_tokens = prefill_tokens
        self._scoring_slot = slots  # one more than the requests use
        layers: int = model.config.get_text_config().num_hidden_layers
        self.cache = SlotCache(layers=layers, slots=slots + 1, context_tokens=context_tokens)
        shape = (slots, context_tokens)
        self._tokens = np.zeros(shape, np.int64)
        self._uniform = np.zeros(shape, np.float64)
        self._logprob = np.zeros(shape, np.float64)
        self._versions = np.zeros(shape, np.int64)
        self._total = np.zeros(slots, np.int64)
        self._cached = np.zeros(slots, np.int64)
        self._end = np.zeros(slots, np.int64)
        self._busy = np.zeros(slots, np.bool_)
        self._used = np.zeros(slots, np.int64)
        self._clock = 0
        self._session: list[str | None] = [None] * slots
        self._temperature = np.ones(slots, np.float32)
        self._top_k = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots, np.float64)
        self._stops = np.full((slots, 1), -1, np.int64)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self.running) or (bool(self.waiting) and not self.held)

    def step(self) -> None:
        """Admit what fits, prefill at most one chunk, sample one token for every ready row."""
        self._admit()
        self._prefill()
        self._decode()

    def forget(self, future: "Future[Any]") -> None:
        """Drop the request behind a cancelled future; its slot is free at once."""
        self.waiting = deque(r for r in self.waiting if r.future is not future)
        for slot, request in self.running.items():
            if request.future is future:
                self._vacate(slot)
                return

    def forget_prefixes(self) -> None:
        """Drop every key and value; running rows are prefilled again from their ids."""
        self._cached[:] = 0
        self.cache.clear()

    def score(self, ids: Ids, temperature: float) -> list[float]:
        """Entry t-1 is the logprob (nats) of token t given the ids before it, as sampling sees it.

        Goes through the pool in chunks like any prompt.
        """
        out: list[float] = []
        for start in range(0, len(ids) - 1, self._prefill_tokens):
            stop = min(start + self._prefill_tokens, len(ids) - 1)
            columns = np.arange(start, stop)[None]
            slots = np.array([self._scoring_slot])
            logits_1TV = self._forward(self.model, slots, ids[None, start:stop], columns).logits
            temperature_T = torch.full((stop - start,), temperature, device=self.model.device)
            logp_TV = processed_logprobs(logits_1TV[0], temperature_T, None, None)
            targets = self._tensor(ids[start + 1 : stop + 1])
            out += logp_TV.gather(-1, targets[:, None]).squeeze(-1).tolist()
        return out

    def _admit(self) -> None:
        while self.waiting and not self.held:
            idle = np.flatnonzero(~self._busy)
            if not idle.size:
                return
            request = self.waiting.popleft()
            if not request.future.cancelled():
                self._start(self._choose(idle, request.session), request)

    def _choose(self, idle: Ids, session: str) -> int:
        """The session's own slot, else an empty one, else the least recently used."""
        for slot in idle:
            if self._session[slot] == session:
                return int(slot)
        age = np.where(self._cached[idle] > 0, self._used[idle], -1)
        return int(idle[age.argmin()])

    def _start(self, slot: int, request: Request) -> None:
        prompt, sampling, length = request.prompt, request.sampling, len(request.prompt)
        known = self._tokens[slot, : self._cached[slot]]
        # The last prompt id always goes through a decode step: that one yields the first logits.
        self._cached[slot] = min(longest_common_prefix(known, prompt), length - 1)
        self._tokens[slot, :length] = prompt
        self._total[slot], self._end[slot] = length, length + request.max_tokens
        self._uniform[slot, length : length + request.max_tokens] = uniforms(
            sampling.seed, request.max_tokens
        )
        self._temperature[slot] = sampling.temperature
        self._top_k[slot], self._top_p[slot] = sampling.top_k, sampling.top_p
        self._set_stops(slot, sampling.stop_ids)
        self._session[slot] = request.session
        self._busy[slot] = True
        self.running[slot] = request

    def _set_stops(self, slot: int, stop_ids: frozenset[int]) -> None:
        if len(stop_ids) > self._stops.shape[1]:
            wider = np.full((len(self._stops), len(stop_ids)), -1, np.int64)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._stops[slot] = -1
        self._stops[slot, : len(stop_ids)] = sorted(stop_ids)

    def _vacate(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock
        self._busy[slot] = False
        del self.running[slot]

    def _prefill(self) -> None:
        """One chunk: oldest rows first, rows x longest piece within the token budget."""
        chosen: list[int] = []
        width = 0
        for slot in self.running:  # in order of admission
            if self._cached[slot] >= self._total[slot] - 1:
                continue
            self._borrow(slot)
            need = int(self._total[slot] - 1 - self._cached[slot])
            if need == 0 or any(self._will_serve(other, slot) for other in chosen):
                continue
            wider = max(width, min(need, self._prefill_tokens))
            if wider * (len(chosen) + 1) > self._prefill_tokens:
                break
            chosen.append(slot)
            width = wider
        if chosen:
            self._prefill_rows(np.array(chosen), width)

    def _prefill_rows(self, slots: Ids, width: int) -> None:
        columns = self._cached[slots][:, None] + np.arange(width)
        padding = columns >= self._total[slots][:, None] - 1
        columns[padding] = self.cache.scratch_column
        ids = self._tokens[slots[:, None], np.where(padding, 0, columns)]
        self._forward(self.model.base_model, slots, ids, columns)
        self._cached[slots] += (~padding).sum(1)

    def _borrow(self, slot: int) -> None:
        """Copy a longer cached prefix from another slot, say of the same group, if there is one."""
        length = int(self._total[slot] - 1)
        differ = self._tokens[:, :length] != self._tokens[slot, :length]
        common = np.where(differ.any(1), differ.argmax(1), length)
        common = np.minimum(common, self._cached)
        source = int(common.argmax())
        if common[source] - self._cached[slot] >= min(WORTH_SHARING, length):
            self.cache.copy_prefix(source, slot, int(common[source]))
            self._cached[slot] = common[source]

    def _will_serve(self, other: int, slot: int) -> bool:
        """Whether a row of this chunk computes a prefix that the row can borrow afterwards."""
        common = longest_common_prefix(
            self._tokens[other, : self._total[other] - 1],
            self._tokens[slot, : self._total[slot] - 1],
        )
        return common - self._cached[slot] >= WORTH_SHARING

    def _decode(self) -> None:
        ready = self._busy & (self._cached == self._total - 1)
        slots = np.flatnonzero(ready)
        if not slots.size:
            return
        # Reading neighbours as one view beats gathering them, unless most would be passengers.
        first, last = slots[0], slots[-1] + 1
        batch = np.arange(first, last) if 2 * slots.size >= last - first else slots
        live = ready[batch]
        at = np.where(live, self._cached[batch], 0)
        columns = np.where(live, at, self.cache.scratch_column)
        ids = self._tokens[batch, at]
        output = self._forward(self.model, batch, ids[:, None], columns[:, None])
        logits_BV = output.logits[:, -1]
        if slots.size < batch.size:
            logits_BV = logits_BV[self._tensor(np.flatnonzero(live))]
        sampled, logprobs = self._sample(slots, logits_BV)
        self._append(slots, sampled, logprobs)

    def _sample(self, slots: Ids, logits_BV: Tensor) -> tuple[Ids, NDArray[np.float64]]:
        temperature, top_k, top_p = (
            values[slots] for values in (self._temperature, self._top_k, self._top_p)
        )
        logp_BV = processed_logprobs(
            logits_BV,
            self._tensor(temperature),
            self._tensor(top_k) if top_k.any() else None,
            self._tensor(top_p) if (top_p < 1).any() else None,
        )
        greedy = temperature == 0
        uniform_B = self._tensor(self._uniform[slots, self._total[slots]])
        ids_B = draw(logp_BV, uniform_B, self._tensor(greedy) if greedy.any() else None)
        logp_B = logp_BV.gather(-1, ids_B[:, None]).squeeze(-1)
        return ids_B.cpu().numpy(), logp_B.double().cpu().numpy()

    def _append(self, slots: Ids, sampled: Ids, logprobs: NDArray[np.float64]) -> None:
        at = self._total[slots]
        self._tokens[slots, at] = sampled
        self._logprob[slots, at] = logprobs
        self._versions[slots, at] = self.version
        self._total[slots] += 1
        self._cached[slots] += 1
        stopped = (self._stops[slots] == sampled[:, None]).any(1)
        done = stopped | (self._total[slots] >= self._end[slots])
        for row in np.flatnonzero(done):
            self._finish(int(slots[row]), "stop" if stopped[row] else "length")

    def _finish(self, slot: int, finish: Finish) -> None:
        request = self.running[slot]
        action = slice(len(request.prompt), int(self._total[slot]))
        self._vacate(slot)
        if not np.isfinite(self._logprob[slot, action]).all():
            fault = EngineFault(
                f"the model (version {self.version}) gave logits that are not finite: "
                "look at the last update's gradient norm, or use a wider dtype"
            )
            settle(request.future, error=fault)
            return
        settle(
            request.future,
            ActionTokens(
                token_ids=tuple(self._tokens[slot, action].tolist()),
                logprobs=tuple(self._logprob[slot, action].tolist()),
                versions=tuple(self._versions[slot, action].tolist()),
                finish=finish,
            ),
        )

    def _forward(self, module: torch.nn.Module, slots: Ids, ids: Ids, columns: Ids) -> Any:
        """Run new ids of some rows through a module; a scratch column marks padding.

        All int64: `slots` (B,), `ids` and `columns` (B, T). Padding looks at column 0 only.
        """
        positions = np.where(columns == self.cache.scratch_column, 0, columns)
        needed = int(positions.max()) + 1
        span = min(-(-needed // SPAN_STEP) * SPAN_STEP, self.cache.scratch_column)
        slots_B, positions_BT = self._tensor(slots), self._tensor(positions)
        together = bool((np.diff(slots) == 1).all())
        self.cache.aim(
            Window(
                slots_B=slots_B,
                columns_BT=self._tensor(columns),
                rows=rows_of(int(slots[0]), slots_B, together=together),
                span=span,
            )
        )
        visible = torch.arange(span, device=slots_B.device) <= positions_BT[:, None, :, None]
        mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=slots_B.device)
        return module(
            input_ids=self._tensor(ids),
            position_ids=positions_BT,
            attention_mask=mask.masked_fill_(~visible, -torch.inf),
            past_key_values=self.cache,
            use_cache=True,
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.model.device)
