"""`OpenAI`: the responses and the chat completions API through the official client, streamed inside the call."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from perdure.errors import InvalidInput
from perdure.models import chat, responses
from perdure.models.clients import Clients, made, missing, secrets_of
from perdure.models.messages import Answer, Request
from perdure.models.model import Model
from perdure.models.streams import CONNECT_S, hear, time_left_s
from perdure.models.wire import Names
from perdure.tool.call import Call

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Api = Literal["responses", "chat"]


class OpenAI(Model):
    """A model of OpenAI, or of anybody who speaks its language at `base_url`. Without a client of yours one is made.

    `api` is "responses" for OpenAI itself and "chat", which everybody speaks, for a base_url. The key is `api_key`, or the one in
    OPENAI_API_KEY. What is asked of a base_url has no known price: give one with price=Price(…).
    """

    def __init__(
        self,
        name: str,
        client: AsyncOpenAI | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        api: Api | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        if client is not None and (base_url is not None or api_key is not None):
            raise InvalidInput(f"model {name}: give base_url and api_key to the client, or to the model instead of a client")
        if api not in (None, "responses", "chat"):
            raise InvalidInput(f'model {name}: api={api!r:.60}: "responses" or "chat"')
        self.api: Api = api or ("responses" if base_url is None else "chat")
        self.provider = "openai" if base_url is None else ""
        self._base_url = base_url
        self._clients = Clients(client, partial(_client, name, base_url, api_key), "AsyncAPIClient")

    def identity(self) -> list[Any]:
        return [*super().identity(), self.api, self._base_url]

    def body(self, request: Request) -> dict[str, Any]:
        """What is sent for this request, word for word."""
        if self.api == "responses":
            return responses.body(request)
        return chat.body(request, limit="max_completion_tokens" if self._base_url is None else "max_tokens")

    async def answer(self, request: Request, call: Call) -> Answer:
        client = await self._clients.here()
        heard = responses.Heard() if self.api == "responses" else chat.Heard()
        opening = self._open(client, request, call)
        request_id = await hear(self, call, opening, heard, id_header="x-request-id", secrets=secrets_of(client))
        return heard.answer(Names(request.tools), request_id)

    def _open(self, client: Any, request: Request, call: Call) -> Any:
        from openai import Timeout

        whole = self.body(request)
        left_s = time_left_s(call, self.timeout_s)
        told: dict[str, Any] = {
            "model": whole.pop("model"),
            "stream": True,
            "extra_body": whole,
            "extra_headers": {"Idempotency-Key": call.key},
            "timeout": Timeout(left_s, connect=min(left_s, CONNECT_S)),
        }
        # What was said comes with the rest: the SDK would copy the whole conversation to look for files in it.
        if self.api == "responses":
            return client.responses.create(input=[], **told)
        return client.chat.completions.create(messages=[], **told)


def _client(name: str, base_url: str | None, api_key: str | None) -> AsyncOpenAI:
    try:
        from openai import AsyncOpenAI
    except ImportError:
        raise missing(name, "openai") from None
    way_out = "set OPENAI_API_KEY, or give api_key=… (any text for a server that wants none)"
    client: AsyncOpenAI = made(lambda: AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0), name, way_out)
    _ = client.responses, client.chat.completions  # imported here, and not on the loop
    return client
