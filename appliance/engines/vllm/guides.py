"""Guides of one model: checked by vLLM's rules, compiled by the backend that vLLM would choose.

vLLM has one backend for an engine, that of its first request, though another one may be chosen for
the next. Here every guide is compiled by its own; they all fill the same bitmask.

In one case the choice is another one: xgrammar allows control characters in strings whose length is
bounded, which is no JSON; guidance does not.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import (
    GuidanceBackend,
    has_guidance_unsupported_json_features,
    validate_guidance_grammar,
)
from vllm.v1.structured_output.backend_outlines import OutlinesBackend
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
)
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

from appliance.engines.protocol import GuideRefused
from appliance.engines.vllm.reasoning import tokenizer_of

LONGEST_REASON = 500
"""Characters; backends quote the guide, and all that they tried."""

_XGRAMMAR = "xgrammar"
_GUIDANCE = "guidance"
_BACKENDS = {
    _XGRAMMAR: XgrammarBackend,
    _GUIDANCE: GuidanceBackend,
    "outlines": OutlinesBackend,
}


class Guides:
    """Turns guides into grammars. May be called from several threads."""

    def __init__(self, config: VllmConfig, manager: StructuredOutputManager) -> None:
        self._config = config
        self._manager = manager
        self._making = threading.Lock()
        """Held to make the tokenizer and a backend."""
        self._compiling = threading.Lock()
        """Held while a backend compiles that has state."""
        self._tokenizer: Any = None
        self._backends: dict[str, StructuredOutputBackend] = {}

    def prepare(self, structured: StructuredOutputsParams) -> None:
        """Compile, for the backend's cache. Raises `GuideRefused`."""
        self._check(structured)
        self._compile(structured, None)

    def attach(self, request: Request, output: Sequence[int]) -> None:
        """Give a new request its grammar, and then `output`, which ends up behind it.

        vLLM gets the output as if it had just been drawn, so that a grammar that begins only
        after reasoning is in the state it would be in. Raises `GuideRefused`, also if
        `output` does not follow the guide.
        """
        guided = request.structured_output_request
        stops = request.sampling_params.all_stop_token_ids
        if not stops:
            raise GuideRefused("the model has no token that ends its output")
        self._check(guided.params)
        guided.grammar = self._compile(guided.params, stops)
        try:
            self._manager._get_reasoner(request)
        except Exception as error:  # of the parser, about a tokenizer that is not its model's
            raise _refused(error) from error
        for token in output:
            request.append_output_token_ids(token)
            if not self._manager.accept_tokens(request, [token]):
                raise GuideRefused("the output so far does not follow its guide")

    def _check(self, structured: StructuredOutputsParams) -> None:
        """Choose the backend. The front end has chosen one when it checked the guide by vLLM's
        rules; of others this is done here."""
        with self._making:
            if self._tokenizer is None:
                # vLLM's manager has none because the engine is not to load one when it is built.
                self._tokenizer = self._manager.tokenizer = tokenizer_of(self._config)
        try:
            params = SamplingParams(structured_outputs=structured)
            if structured._backend is None:
                params._validate_structured_outputs(
                    self._config.model_config,
                    self._config.structured_outputs_config,
                    self._tokenizer,
                )
            if structured._backend == _XGRAMMAR and self._needs_guidance(structured):
                with contextlib.suppress(VLLMValidationError):
                    validate_guidance_grammar(params, tokenizer=None)
                    structured._backend = _GUIDANCE
        except Exception as error:  # parsers of several libraries, each with errors of its own
            raise _refused(error) from error

    def _needs_guidance(self, structured: StructuredOutputsParams) -> bool:
        """Whether xgrammar would allow what is no JSON, and guidance knows the schema."""
        if structured.json is None or not GuidanceBackend.is_tokenizer_supported(self._tokenizer):
            return False
        schema = structured.json
        if isinstance(schema, str):
            schema = json.loads(schema)
        return _bounds_a_length(schema) and not has_guidance_unsupported_json_features(schema)

    def _compile(
        self, structured: StructuredOutputsParams, stops: set[int] | None
    ) -> StructuredOutputGrammar:
        name = structured._backend
        try:
            backend = self._backend(name)
            kind, text = get_structured_output_key(structured)
            if name == _XGRAMMAR:  # slow at times, and made for threads
                return backend.compile_grammar(kind, text, stop_token_ids=stops)
            with self._compiling:
                return backend.compile_grammar(kind, text, stop_token_ids=stops)
        except Exception as error:
            raise _refused(error) from error

    def _backend(self, name: str) -> StructuredOutputBackend:
        if name not in _BACKENDS:
            raise ValueError(f"guides are not compiled by {name}")
        with self._making:
            for wanted in (_XGRAMMAR, name):
                if wanted not in self._backends:
                    self._backends[wanted] = _BACKENDS[wanted](
                        self._config,
                        tokenizer=self._tokenizer,
                        vocab_size=self._config.model_config.get_vocab_size(),
                    )
            # It allocates the bitmask.
            self._manager.backend = self._backends[_XGRAMMAR]
            return self._backends[name]


def _bounds_a_length(schema: Any) -> bool:
    """Whether it says so anywhere; a property of that name counts, too, and does no harm."""
    if isinstance(schema, dict):
        return not schema.keys().isdisjoint(("minLength", "maxLength")) or any(
            map(_bounds_a_length, schema.values())
        )
    return isinstance(schema, list) and any(map(_bounds_a_length, schema))


def _refused(error: Exception) -> GuideRefused:
    reason = " ".join(str(error).split()) or type(error).__name__
    return GuideRefused(reason[:LONGEST_REASON])
