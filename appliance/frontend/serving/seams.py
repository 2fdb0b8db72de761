"""What front ends rely on inside vLLM, checked when one begins.

One exact version: an `AsyncLLM` of vLLM's is given an engine client and states that are ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import vllm
from fastapi import FastAPI
from mistral_common.tokens.tokenizers.audio import AudioEncoder
from mistral_common.tokens.tokenizers.instruct import InstructTokenizerV7
from vllm import platforms
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.pooling.embed.protocol import (
    EmbeddingChatInputRequest,
    _is_batched_chat_messages,
)
from vllm.entrypoints.speech_to_text.base.serving import SpeechToTextBaseServing
from vllm.model_executor.models import registry
from vllm.multimodal.image import open_image
from vllm.multimodal.media import ImageMediaIO
from vllm.parser.abstract_parser import DelegatingParser
from vllm.renderers import BaseRenderer
from vllm.renderers.chat_utils import AsyncMultiModalContentParser
from vllm.renderers.mistral import MistralRenderer
from vllm.renderers.params import TokenizeParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState

VERSION: Final = "0.32.0"

SIGNATURES: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (AsyncLLM.__init__, ("vllm_config", "executor_class", "log_stats")),
    (AsyncLLM.abort, ("request_id", "internal")),
    (EngineCoreClient.get_supported_tasks_async, ()),
    (EngineCoreClient.add_request_async, ("request",)),
    (EngineCoreClient.abort_requests_async, ("request_ids",)),
    (EngineCoreClient.get_output_async, ()),
    (OutputProcessor.abort_requests, ("request_ids", "internal")),
    (RequestOutputCollector.__init__, ("output_kind", "request_id")),
    (RequestOutputCollector.put, ("output",)),
    (RequestOutputCollector.get, ()),
    (RequestOutputCollector.get_nowait, ()),
    (init_app_state, ("engine_client", "state", "args", "supported_tasks")),
    (TokenizeParams._text_len_check, ("tokenizer", "text")),
    (TokenizeParams._get_text_truncation_offset, ("tokenizer", "text")),
    (AnthropicServingMessages.message_stream_converter, ("generator",)),
    (FastAPI.build_middleware_stack, ()),
    (registry._run_in_subprocess, ("fn",)),
    (registry._LazyRegisteredModel._save_modelinfo_to_cache, ("mi", "module_hash")),
    (
        DelegatingParser.parse_delta,
        ("delta_text", "delta_token_ids", "request", "prompt_token_ids", "finished"),
    ),
    (OpenAIServingResponses.responses_stream_generator, ("request",)),
    (
        OpenAIServingResponses._render_resolved_response_inputs,
        ("request", "prev_response"),
    ),
    (
        OpenAIServingResponses.responses_background_stream_generator,
        ("response_id", "starting_after"),
    ),
)

FIELDS: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (RequestState.__init__, ("parent_req", "queue")),
    (ResponsesResponse.from_request, ("request", "status")),
    (
        EngineCoreRequest,
        ("request_id", "prompt_token_ids", "sampling_params", "pooling_params"),
    ),
    (
        EngineCoreOutput,
        ("request_id", "new_token_ids", "finish_reason", "stop_reason"),
    ),
)
"""Names that have to be among the parameters, in any place."""

SOURCES: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (AsyncLLM.__init__, ("EngineCoreClient.make_async_mp_client(",)),
    (
        EmbeddingChatInputRequest.normalize_input_messages,
        ("if not _is_chat_messages(input_data):",),
    ),
    (_is_batched_chat_messages, ("all(_is_chat_messages(item)",)),
    (TokenizeParams._text_len_check, ("self.truncate_prompt_tokens is None:",)),
    (TokenizeParams._get_text_truncation_offset, ('self.truncation_side != "left"',)),
    (AsyncLLM.add_request, ("queue = RequestOutputCollector(",)),
    (RequestOutputCollector.put, ("if self.output is None or", "aggregate=self.aggregate")),
    (open_image, ("formats=ALLOWED_IMAGE_FORMATS",)),
    (ImageMediaIO.load_bytes, ("envs.VLLM_MAX_IMAGE_PIXELS", "open_image(")),
    (
        AsyncMultiModalContentParser._image_with_uuid_async,
        ("await self._connector.fetch_image_async(image_url)",),
    ),
    (
        BaseRenderer.__init__,
        (
            "self._mm_executor = ThreadPoolExecutor(max_workers=1)",
            "self._process_multimodal, executor=self._mm_executor",
        ),
    ),
    (BaseRenderer.warmup_mm, ("if self._mm_warmup_done:",)),
    (
        MistralRenderer.render_messages_async,
        ("await parse_chat_messages_async(", "await self._apply_chat_template_async("),
    ),
    (InstructTokenizerV7._encode_content_chunk, ("self.audio_encoder(chunk)",)),
    (AudioEncoder._encode_audio_tokens, ("[self.audio_token] * num_audio_tokens",)),
    (BaseRenderer._process_tokens_async, ("await self._process_multimodal_async(",)),
    (AsyncLLM.generate, ("except (VLLMClientError, GracefulHTTPError)",)),
    (
        SpeechToTextBaseServing._decode_and_chunk_speech,
        ("y, sr = load_audio(", "except ValueError:", "chunks = split_audio("),
    ),
    (
        SpeechToTextBaseServing._preprocess_speech_to_text,
        (
            "await self._decode_and_chunk_speech_async(audio_data)",
            "self.model_cls.validate_language(request.language)",
        ),
    ),
    (
        SpeechToTextBaseServing._create_speech_to_text,
        ("self.engine_client.generate(", "merge_async_iterators(*list_result_generator)"),
    ),
    (
        DelegatingParser.parse_delta,
        ("state = self._stream_state", "state.tool_call_text_started", "state.commit("),
    ),
    (
        registry._LazyRegisteredModel.inspect_model_cls,
        ("mi = _run_in_subprocess(", "self._save_modelinfo_to_cache(mi, module_hash)"),
    ),
    (
        OpenAIServingResponses.__init__,
        ("self.response_store", "self.msg_store", "self.event_store", "self.background_tasks"),
    ),
)
"""What has to be said in the source of a function."""


class SeamMoved(RuntimeError):
    """This vLLM is not the one that front ends were written for."""


def check_seams() -> None:
    """Raise `SeamMoved` unless vLLM has the version, signatures and attributes relied on."""
    if vllm.__version__ != VERSION:
        raise SeamMoved(f"vLLM is {vllm.__version__}, front ends are for {VERSION}")
    for function, expected in SIGNATURES:
        names = _parameters(function)
        if tuple(names[: len(expected)]) != expected:
            raise SeamMoved(f"{function.__qualname__} takes {names}, not {expected}")
    for function, wanted in FIELDS:
        if missing := set(wanted) - set(_parameters(function)):
            raise SeamMoved(f"{function.__qualname__} does not take {sorted(missing)} any more")
    for function, phrases in SOURCES:
        source = inspect.getsource(function)
        for phrase in phrases:
            if phrase not in source:
                raise SeamMoved(f"{function.__qualname__} does not do {phrase!r} any more")
    if "_current_platform" not in vars(platforms):
        raise SeamMoved("vLLM keeps its platform elsewhere")


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]
