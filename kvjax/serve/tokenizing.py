"""`/tokenize` and `/detokenize`, in the form of vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from kvjax.engine import Engine
from kvjax.request.prompts import rows_of

from .dialects import Template
from .errors import ApiError
from .fields import Flag, Strict, String, refused
from .functions import Tools
from .messages import Messages
from .schema import Ids


class Tokenize(Strict):
    """A request for `/tokenize`: a prompt, or the messages of a chat.

    Attributes:
        add_special_tokens: whether the tokenizer adds its special tokens to a prompt.
        add_generation_prompt: whether the chat template ends with the beginning of an answer.
        return_token_strs: whether the names of the tokens come too.
    """

    model: String = None
    prompt: Annotated[str | None, Field(description="a string, or null beside messages")] = None
    messages: Annotated[Messages | None, Field(description="messages, or null beside a prompt")] = None
    tools: Tools = None
    add_special_tokens: Flag = True
    add_generation_prompt: Flag = True
    return_token_strs: Flag = False
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description="beside messages, an object with options of the chat template")
    ] = None

    @model_validator(mode="after")
    def _has_one(self) -> Tokenize:
        if (self.prompt is None) == (self.messages is None):
            raise refused("prompt", "value")
        for name in ("tools", "chat_template_kwargs"):
            if getattr(self, name) and self.messages is None:
                raise refused(name, "value")
        return self


class Detokenize(Strict):
    """A request for `/detokenize`."""

    model: String = None
    tokens: Annotated[Ids, Field(description="a list of token ids, not empty")]


def tokenized(engine: Engine, template: Template, request: Tokenize) -> dict[str, Any]:
    """The answer of `/tokenize`. Raises ApiError for what the tokenizer or the chat template refuses."""
    prompt: Any = request.prompt
    options = None
    if request.messages is not None:
        prompt = template.shown([message.document for message in request.messages])
        tools = {"tools": [tool.document for tool in request.tools]} if request.tools else {}
        options = (request.chat_template_kwargs or {}) | tools
    try:
        (row,) = rows_of(
            prompt,
            engine.tokenizer,
            engine.params.config.vocab_size,
            begins=request.messages is not None or request.add_special_tokens is not False,
            answered=request.add_generation_prompt is not False,
            chat_template_kwargs=options,
        )
    except ValueError as error:
        raise ApiError(400, str(error), "prompt" if options is None else "messages", "invalid_value") from None
    names = engine.tokenizer.convert_ids_to_tokens(row.tolist()) if request.return_token_strs else None
    longest = engine.sizes.max_prompt
    return {"count": row.size, "max_model_len": longest, "tokens": row.tolist(), "token_strs": names}


def detokenized(engine: Engine, template: Template, request: Detokenize) -> dict[str, Any]:
    """The answer of `/detokenize`: text with special tokens. Raises ApiError for ids that are none."""
    last = engine.params.config.vocab_size - 1
    if outside := [token for token in request.tokens if not 0 <= token <= last]:
        raise ApiError(400, f"tokens has {outside[0]}: expected ids in 0 .. {last}", "tokens", "invalid_value")
    return {"prompt": engine.tokenizer.decode(request.tokens, skip_special_tokens=False)}
