"""An agent as people write it: the OpenAI SDK, a tool, a loop. It knows nothing of agentrl."""

import asyncio
import hashlib
import json
import sys
from typing import Any

from openai import AsyncOpenAI

SEARCH: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look a name up in the register.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
}


def search(name: str) -> str:
    return str(hashlib.sha256(name.encode()).digest()[0])


async def solve(client: AsyncOpenAI, question: str, *, stream: bool = False) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        said = await (streamed if stream else asked)(client, messages)
        messages.append(said)
        if not said.get("tool_calls"):
            return said["content"] or ""
        for call in said["tool_calls"]:
            result = search(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def asked(client: AsyncOpenAI, messages: list[Any]) -> Any:
    answer = await client.chat.completions.create(model="any", messages=messages, tools=[SEARCH])
    return answer.choices[0].message.model_dump(exclude_none=True)


async def streamed(client: AsyncOpenAI, messages: list[Any]) -> Any:
    said: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, Any] = {}
    async for chunk in await client.chat.completions.create(
        model="any", messages=messages, tools=[SEARCH], stream=True
    ):
        delta = chunk.choices[0].delta
        said["content"] += delta.content or ""
        for part in delta.tool_calls or []:
            assert part.function is not None
            call = calls.setdefault(part.index, {"type": "function", "function": {"arguments": ""}})
            call["id"] = part.id or call["id"]
            call["function"]["name"] = part.function.name or call["function"]["name"]
            call["function"]["arguments"] += part.function.arguments or ""
    return {**said, "tool_calls": list(calls.values())} if calls else said


if __name__ == "__main__":
    print(asyncio.run(solve(AsyncOpenAI(), sys.stdin.read(), stream="--stream" in sys.argv)))
