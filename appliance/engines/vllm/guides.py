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
from appliance.engines.vllm.guide_budget import GuideBudget
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


class GuideCompiler:
    """Turns guides into grammars, with or without an engine. May be called from several threads."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._making = threading.Lock()
        """Held to make the tokenizer and a backend."""
        self._compiling = threading.Lock()
        """Held while a backend compiles that has state."""
        self._tokenizer: Any = None
        self._backends: dict[str, StructuredOutputBackend] = {}

    @property
    def tokenizer(self) -> Any:
        """The model's; loaded when it is first asked for."""
        with self._making:
            if self._tokenizer is None:
                self._tokenizer = tokenizer_of(self._config)
            return self._tokenizer

    @property
    def masks(self) -> StructuredOutputBackend:
        """The backend that allocates the bitmask."""
        return self._backend(_XGRAMMAR)

    def check(self, structured: StructuredOutputsParams) -> None:
        """Check a guide by vLLM's rules, and choose its backend. Raises `GuideRefused`."""
        tokenizer = self.tokenizer
        try:
            params = SamplingParams(structured_outputs=structured)
            if structured._backend is None:
                params._validate_structured_outputs(
                    self._config.model_config,
                    self._config.structured_outputs_config,
                    tokenizer,
                )
            if structured._backend == _XGRAMMAR and self._needs_guidance(structured):
                with contextlib.suppress(VLLMValidationError):
                    validate_guidance_grammar(params, tokenizer=None)
                    structured._backend = _GUIDANCE
        except Exception as error:  # parsers of several libraries, each with errors of its own
            raise _refused(error) from error

    def _needs_guidance(self, structured: StructuredOutputsParams) -> bool:
        """Whether xgrammar would allow what is no JSON, and guidance knows the schema."""
        if structured.json is None or not GuidanceBackend.is_tokenizer_supported(self.tokenizer):
            return False
        schema = structured.json
        if isinstance(schema, str):
            schema = json.loads(schema)
        return _bounds_a_length(schema) and not has_guidance_unsupported_json_features(schema)

    def compile(
        self, structured: StructuredOutputsParams, stops: set[int] | None = None
    ) -> StructuredOutputGrammar:
        """The grammar of a guide that was checked. Raises `GuideRefused`."""
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
        tokenizer = self.tokenizer
        with self._making:
            if name not in self._backends:
                self._backends[name] = _BACKENDS[name](
                    self._config,
                    tokenizer=tokenizer,
                    vocab_size=self._config.model_config.get_vocab_size(),
                )
            return self._backends[name]


class Guides:
    """The guides of an engine's requests. May be called from several threads."""

    def __init__(self, config: VllmConfig, manager: StructuredOutputManager) -> None:
        self._compiler = GuideCompiler(config)
        self._manager = manager

    def prepare(self, structured: StructuredOutputsParams) -> None:
        """Compile, for the backend's cache. Raises `GuideRefused`."""
        self._compiler.check(structured)
        self._compiler.compile(structured)

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
        self._compiler.check(guided.params)
        guided.grammar = self._compiler.compile(guided.params, stops)
        # vLLM's manager has neither because the engine is not to load a tokenizer when it is built.
        self._manager.tokenizer = self._compiler.tokenizer
        self._manager.backend = self._compiler.masks
        try:
            self._manager._get_reasoner(request)
        except Exception as error:  # of the parser, about a tokenizer that is not its model's
            raise _refused(error) from error
        for token in output:
            request.append_output_token_ids(token)
            if not self._manager.accept_tokens(request, [token]):
                raise GuideRefused("the output so far does not follow its guide")
        guided.grammar = GuideBudget(guided.grammar)  # what came before was paid for


def took_too_long(request: Request) -> bool:
    """Whether a request that ended with an error ended because of its guide."""
    guided = request.structured_output_request
    return guided is not None and isinstance(guided.grammar, GuideBudget) and guided.grammar.used_up


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
