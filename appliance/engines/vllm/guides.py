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
from vllm.tokenizers import get_tokenizer
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

from appliance.engines.protocol import Guide, GuideKind, GuideRefused

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

    def prepare(self, guide: Guide) -> None:
        """Compile, for the backend's cache. Raises `GuideRefused`."""
        self._compile(self._checked(guide), None)

    def compile(
        self, guide: Guide, params: SamplingParams, output: Sequence[int]
    ) -> StructuredOutputGrammar:
        """The grammar as it stands behind `output`; `params` are told of it.

        Raises `GuideRefused`, also if `output` does not follow the guide.
        """
        stops = params.all_stop_token_ids
        if not stops:
            raise GuideRefused("the model has no token that ends its output")
        params.structured_outputs = self._checked(guide)
        grammar = self._compile(params.structured_outputs, stops)
        if output and not grammar.accept_tokens("", list(output)):
            raise GuideRefused("the output so far does not follow its guide")
        return grammar

    def _checked(self, guide: Guide) -> StructuredOutputsParams:
        """vLLM's parameters, with the backend chosen."""
        with self._making:
            if self._tokenizer is None:
                self._tokenizer = get_tokenizer(self._config.model_config.tokenizer)
        try:
            structured = _structured_outputs(guide)
            params = SamplingParams(structured_outputs=structured)
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
        return structured

    def _needs_guidance(self, structured: StructuredOutputsParams) -> bool:
        """Whether xgrammar would allow what is no JSON, and guidance knows the schema."""
        if structured.json is None or not GuidanceBackend.is_tokenizer_supported(self._tokenizer):
            return False
        schema = json.loads(structured.json)
        return _bounds_a_length(schema) and not has_guidance_unsupported_json_features(schema)

    def _compile(
        self, structured: StructuredOutputsParams, stops: set[int] | None
    ) -> StructuredOutputGrammar:
        name = structured._backend
        backend = self._backend(name)
        kind, text = get_structured_output_key(structured)
        try:
            if name == _XGRAMMAR:  # slow at times, and made for threads
                return backend.compile_grammar(kind, text, stop_token_ids=stops)
            with self._compiling:
                return backend.compile_grammar(kind, text, stop_token_ids=stops)
        except Exception as error:
            raise _refused(error) from error

    def _backend(self, name: str) -> StructuredOutputBackend:
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


def _structured_outputs(guide: Guide) -> StructuredOutputsParams:
    match guide.kind:
        case GuideKind.JSON_OBJECT:
            return StructuredOutputsParams(json_object=True)
        case GuideKind.CHOICE:
            return StructuredOutputsParams(choice=json.loads(guide.text))
        case _:
            return StructuredOutputsParams(**{guide.kind.value: guide.text})


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
