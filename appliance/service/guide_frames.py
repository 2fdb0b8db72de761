"""Frames between the core and the compiler of guides: a length, then one msgpack object. No pickle.

    compiler                                       core
                                   <-  ReadFolders
    CompilerReady                  ->
                                   <-  CompileGuide(number)
    ModelKnown(number)             ->
    GuideCompiled(number)          ->

The core sends one guide at a time, so it knows which one ended a compiler.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from appliance import framing
from appliance.service.front_frames import FrontModel


class ReadFolders(msgspec.Struct, frozen=True, tag=True):
    """The first frame: the folders of the models whose guides may come. The compiler reads no other
    files from then on."""

    folders: tuple[str, ...]


class CompileGuide(msgspec.Struct, frozen=True, tag=True):
    """Compile a guide (`appliance.engines.vllm.messages.encode_guide`) for a model."""

    number: int
    model: FrontModel
    guide: bytes


class CompilerReady(msgspec.Struct, frozen=True, tag=True):
    """The compiler takes guides."""


class ModelKnown(msgspec.Struct, frozen=True, tag=True):
    """The model's tokenizer is loaded: from here on the time is the guide's."""

    number: int


class GuideCompiled(msgspec.Struct, frozen=True, tag=True):
    """The guide can be followed, or why not."""

    number: int
    refused: str | None = None
    """About the guide."""
    failed: str | None = None
    """About the model; it says nothing of the guide."""


ToCompiler: TypeAlias = ReadFolders | CompileGuide
FromCompiler: TypeAlias = CompilerReady | ModelKnown | GuideCompiled


def decoder_for_compiler() -> framing.Decoder[ToCompiler]:
    """For the compiler."""
    return framing.Decoder(msgspec.msgpack.Decoder(ToCompiler))


def decoder_for_core() -> framing.Decoder[FromCompiler]:
    """For the core."""
    return framing.Decoder(msgspec.msgpack.Decoder(FromCompiler))
