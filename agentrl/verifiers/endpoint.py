"""A language model behind an OpenAI-compatible endpoint, asked within stated limits."""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError, PluginError, VerifierFault

if TYPE_CHECKING:
    import httpx

MAX_REPLY_BYTES = 1 << 20
_AGAIN = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
"""Statuses that another try may mend."""


class Spending:
    """What an endpoint was asked and what that cost, in this process."""

    def __init__(self) -> None:
        self.calls = 0
        self.cost = 0.0
        self.lock = Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEndpoint:
    """`POST {url}/chat/completions` for `model`, at temperature 0.

    The key is read from the environment variable `key_variable` at each call ("": there is none);
    it is in no record and no message. A try takes `timeout_s` seconds at most; `tries` of them are
    made when the endpoint is down, late or busy, at most `max_wait_s` seconds apart. `max_calls`
    bounds the tries of this process, and `max_cost` what they cost by the prices for a million
    tokens; a try without a count of tokens costs what it could have at most.

    Raises PluginError without httpx, ConfigError for wrong limits.
    """

    url: str
    model: str
    key_variable: str = "JUDGE_API_KEY"
    max_tokens: int = 512
    timeout_s: float = 60.0
    tries: int = 3
    max_wait_s: float = 10.0
    max_calls: int = 10_000
    max_cost: float = float("inf")
    input_price: float = 0.0
    output_price: float = 0.0
    spending: Spending = field(default_factory=Spending, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if find_spec("httpx") is None:
            raise PluginError("a judge needs httpx: pip install 'agentrl[judge]'")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the endpoint's url {self.url!r} must begin with http:// or https://"
            )
        limits = (self.max_tokens, self.timeout_s, self.tries, self.max_calls, self.max_cost)
        if min(limits) <= 0 or min(self.max_wait_s, self.input_price, self.output_price) < 0:
            raise ConfigError("an endpoint's limits must be above 0, and no price or wait below it")

    async def complete(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of the model's answer. Raises VerifierFault: none to be had, or a limit met.

        No message of it quotes what the endpoint said: that may hold the key.
        """
        import httpx

        reason = ""
        async with httpx.AsyncClient(timeout=self.timeout_s, headers=self._headers()) as client:
            for tried in range(self.tries):
                self._count_call()
                wait_s = min(2.0**tried, self.max_wait_s)
                try:
                    async with asyncio.timeout(self.timeout_s):
                        status, told_s, body = await self._post(client, messages)
                except TimeoutError:
                    reason = f"no answer within {self.timeout_s:g} s"
                except httpx.HTTPError as error:
                    reason = type(error).__name__
                else:
                    if status == 200:
                        return self._text(messages, body)
                    reason = f"status {status}"
                    wait_s = min(max(wait_s, told_s), self.max_wait_s)
                    if status not in _AGAIN:
                        break
                if tried + 1 < self.tries:
                    await asyncio.sleep(wait_s)
        raise VerifierFault(f"the judge {self.model} can't be asked: {reason}")

    def _headers(self) -> Mapping[str, str]:
        if not self.key_variable:
            return {}
        key = os.environ.get(self.key_variable, "")
        if not key:
            raise VerifierFault(f"the judge needs its key in the variable {self.key_variable}")
        return {"Authorization": f"Bearer {key}"}

    def _count_call(self) -> None:
        with self.spending.lock:
            if self.spending.calls >= self.max_calls:
                raise VerifierFault(f"the judge was asked {self.max_calls} times: max_calls is met")
            if self.spending.cost >= self.max_cost:
                raise VerifierFault(f"the judge has cost {self.max_cost:g}: max_cost is met")
            self.spending.calls += 1

    async def _post(
        self, client: "httpx.AsyncClient", messages: Sequence[Mapping[str, str]]
    ) -> tuple[int, float, bytes]:
        """Status, the seconds that it asks to wait, and the body as far as it may go."""
        asked = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        body = b""
        url = f"{self.url.rstrip('/')}/chat/completions"
        async with client.stream("POST", url, json=asked) as response:
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > MAX_REPLY_BYTES:
                    break
        told = response.headers.get("retry-after", "")
        return response.status_code, float(told) if told.isdecimal() else 0.0, body

    def _text(self, messages: Sequence[Mapping[str, str]], body: bytes) -> str:
        try:
            said: Any = json.loads(body)
        except ValueError:
            said = {}
        self._count_cost(messages, said)
        try:
            text = said["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise VerifierFault(f"the judge {self.model} sent no chat completion")
        return text

    def _count_cost(self, messages: Sequence[Mapping[str, str]], said: Any) -> None:
        usage = said.get("usage") if isinstance(said, dict) else None
        used = usage if isinstance(usage, dict) else {}
        most = sum(len(m["content"].encode(errors="replace")) + 16 for m in messages)
        tokens = [
            given if type(given) is int and given >= 0 else most_of_it
            for given, most_of_it in (
                (used.get("prompt_tokens"), most),
                (used.get("completion_tokens"), self.max_tokens),
            )
        ]
        cost = tokens[0] * self.input_price + tokens[1] * self.output_price
        with self.spending.lock:
            self.spending.cost += cost / 1e6
