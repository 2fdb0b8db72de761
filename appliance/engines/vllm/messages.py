"""What front ends and workers say to each other through the core, as bytes that it does not read.

vLLM's own request and output, in the encoding that vLLM's processes speak, but always in one
buffer, and never with a pickle in it, whatever vLLM's environment allows.

Decoding may be done in several threads at once; encoding in one at a time.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from vllm import PoolingParams, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW, MsgpackDecoder, MsgpackEncoder

MAX_REQUEST_BYTES: Final = 32 << 20
MAX_OUTPUT_BYTES: Final = 32 << 20
"""Log probabilities of a long prompt are what comes near it."""


class BadMessage(ValueError):
    """A request or an output that cannot be encoded or decoded; the message says why."""


class _Encoder(MsgpackEncoder):  # type: ignore[misc]
    """Arrays lie in the buffer itself."""

    def __init__(self) -> None:
        super().__init__(size_threshold=MAX_REQUEST_BYTES + MAX_OUTPUT_BYTES)

    def enc_hook(self, obj: Any) -> Any:
        encoded = super().enc_hook(obj)
        if isinstance(encoded, msgspec.msgpack.Ext):
            raise TypeError(f"a {type(obj).__name__} would be pickled")
        return encoded


class _Decoder(MsgpackDecoder):  # type: ignore[misc]
    def ext_hook(self, code: int, data: memoryview) -> Any:
        if code != CUSTOM_TYPE_RAW_VIEW:
            raise TypeError(f"extension {code} is not an array")
        return super().ext_hook(code, data)


# Made here: msgspec crashes where threads are the first to make decoders of a type.
_encoder: Final = _Encoder()
_requests: Final = _Decoder(EngineCoreRequest)
_guides: Final = _Decoder(StructuredOutputsParams)
_outputs: Final = _Decoder(EngineCoreOutput)


def encode_request(request: EngineCoreRequest) -> bytes:
    """All of a request but its prompt's tokens. Raises `BadMessage`."""
    bare = msgspec.structs.replace(request, prompt_token_ids=[])
    return _encode(bare, "request", MAX_REQUEST_BYTES)


def encode_params(params: SamplingParams | PoolingParams) -> bytes:
    """A request that says nothing but how tokens are drawn, or its prompt is pooled."""
    sampling, pooling = None, None
    if isinstance(params, SamplingParams):
        sampling = params
    else:
        pooling = params
    return encode_request(
        EngineCoreRequest(
            request_id="",
            prompt_token_ids=[],
            mm_features=None,
            sampling_params=sampling,
            pooling_params=pooling,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
    )


def decode_request(body: bytes) -> EngineCoreRequest:
    """The request, its prompt empty. Raises `BadMessage`."""
    return _decode(_requests, bytearray(body), "request", MAX_REQUEST_BYTES)


def encode_guide(guide: StructuredOutputsParams) -> bytes:
    """A request's guide alone; the same guide gives the same bytes. Raises `BadMessage`."""
    return _encode(guide, "guide", MAX_REQUEST_BYTES)


def decode_guide(guide: bytes) -> StructuredOutputsParams:
    """Raises `BadMessage`."""
    return _decode(_guides, bytearray(guide), "guide", MAX_REQUEST_BYTES)


def encode_output(output: EngineCoreOutput) -> bytes:
    """Raises `BadMessage`."""
    return _encode(output, "output", MAX_OUTPUT_BYTES)


def decode_output(detail: bytes) -> EngineCoreOutput:
    """Raises `BadMessage`."""
    # torch warns of memory that cannot be written to.
    return _decode(_outputs, bytearray(detail), "output", MAX_OUTPUT_BYTES)


def _encode(message: object, what: str, most_bytes: int) -> bytes:
    try:
        first, *others = _encoder.encode(message)
    except Exception as error:  # of msgspec, and of whatever is in the message
        raise BadMessage(f"the {what} cannot be encoded: {error}") from error
    if others or len(first) > most_bytes:
        raise BadMessage(f"the {what} takes more than {most_bytes} bytes")
    return bytes(first)


def _decode(decoder: _Decoder, data: bytes | bytearray, what: str, most_bytes: int) -> Any:
    if len(data) > most_bytes:
        raise BadMessage(f"the {what} has {len(data)} bytes, more than {most_bytes}")
    try:
        return decoder.decode(data)
    except Exception as error:  # of msgspec, numpy, torch, and of vLLM's own checks
        raise BadMessage(f"the {what} cannot be decoded: {error}") from error
