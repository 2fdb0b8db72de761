"""Front halves of models: built when first asked for, as vLLM's own server makes them."""

from __future__ import annotations

import asyncio
import json
import logging
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from starlette.datastructures import State
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from appliance.checkpoints.architectures.chat_sounds import VOXTRAL
from appliance.checkpoints.language_models import processor_template
from appliance.checkpoints.model_config import read_model_config
from appliance.checkpoints.overrides import language_config, whole_config
from appliance.engines.vllm.configs.types import register_types
from appliance.frontend.core import Core
from appliance.frontend.serving import stored
from appliance.frontend.serving.engine_client import FrontLLM
from appliance.frontend.serving.held_text import keep_held_text
from appliance.frontend.serving.media import prepare_in_turns
from appliance.frontend.serving.mistral_chats import guard_chats
from appliance.frontend.serving.parsing.failures import (
    ParserFailed,
    adapt_parsers,
    with_usable_parsers,
)
from appliance.frontend.serving.single_tokens import ask_for_single_tokens
from appliance.frontend.serving.speech import SERVING as OF_SOUND
from appliance.frontend.serving.speech import decode_in_turns
from appliance.service.front_frames import FrontModel, ModelRefused
from appliance.vocabulary import ModelName, Task

log = logging.getLogger(__name__)

MAX_FRONTS: Final = 32
"""Built at once; the least recently used leaves. A tokenizer of 150k tokens takes some 100 MB."""

LATEST: Final = ":latest"
"""What Ollama's clients add to the name of a model without a tag."""

SERVING: Final = (
    "openai_serving_chat",
    "openai_serving_chat_batch",
    "openai_serving_completion",
    "openai_serving_responses",
    "anthropic_serving_messages",
    "serving_pooling",
    "serving_embedding",
    "serving_classification",
    "serving_scores",
    "serving_render",
    *OF_SOUND,
)
"""Attributes of the state that vLLM's handlers look at; None: the model cannot do it."""


class UnknownModel(Exception):
    """No model has the name, or none was named and there are several."""

    def __init__(self, asked: str | None) -> None:
        self.asked = asked
        message = (
            "model: name one of the models; GET /v1/models lists them"
            if asked is None
            else f"The model `{asked}` does not exist."
        )
        super().__init__(message)


class FrontNotBuilt(Exception):
    """The front half of a model cannot be built; the message says why."""


class ModelFront:
    """A model's front half: vLLM's serving objects, over an engine client of ours."""

    def __init__(self, model: FrontModel, llm: FrontLLM, state: State) -> None:
        self.model = model
        self.llm = llm
        self.state = state
        self.adapt(model)

    def adapt(self, model: FrontModel) -> None:
        """Have the adapters of `model`, which is the same but for these."""
        self.model = model
        self.state.openai_serving_models.lora_requests = {
            # The path is vLLM's wish: engines know it from the core, and look at the name.
            name: LoRARequest(
                lora_name=name, lora_int_id=number, lora_path=name, base_model_name=None
            )
            for number, name in enumerate(model.adapters, 1)
        }


class ModelFronts:
    """All models of the catalogue, and the front halves that are built."""

    def __init__(self, core: Core, models: Iterable[FrontModel]) -> None:
        self._core = core
        self._models: dict[ModelName, FrontModel] = {}
        self._names: dict[str, FrontModel] = {}
        self._built: OrderedDict[ModelName, ModelFront] = OrderedDict()
        self._building: dict[ModelName, asyncio.Task[ModelFront]] = {}
        self._turn = asyncio.Lock()  # vLLM keeps what it configures in globals
        self.change(models)

    def change(self, models: Iterable[FrontModel]) -> None:
        """The catalogue is this from now on. What was removed or changed lives until the last
        call that uses it is over; adapters come and go as they are."""
        self._models = {model.name: model for model in models}
        self._names = {
            alias: model for model in self._models.values() for alias in all_names_of(model)
        }
        self._names |= {alias: model for model in self._models.values() for alias in model.aliases}
        self._names |= {
            name: adapted(model, name) for model in self._models.values() for name in model.adapters
        }
        self._names |= self._models
        for name, front in list(self._built.items()):
            model = self._models.get(name)
            if model is not None and _but_adapters(model) == _but_adapters(front.model):
                front.adapt(model)
            else:
                del self._built[name]

    def resolve(self, asked: str | None) -> FrontModel:
        """The model that is meant by a name, or by none. Raises `UnknownModel`."""
        if asked is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        model = None if asked is None else self._names.get(asked)
        if model is None:
            raise UnknownModel(asked)
        return model

    async def get(self, model: FrontModel) -> ModelFront:
        """The model's front half. Raises `FrontNotBuilt`."""
        model = self._models.get(model.base, model)
        front = self._built.get(model.name)
        if front is not None and front.model == model and not front.llm.errored:
            self._built.move_to_end(model.name)
            return front
        task = self._building.get(model.name)
        if task is None:
            task = asyncio.create_task(self._build(model))
            self._building[model.name] = task
            task.add_done_callback(lambda _: self._building.pop(model.name, None))
        return await asyncio.shield(task)

    async def _build(self, model: FrontModel) -> ModelFront:
        try:
            # All of it in a thread: other streams of this process go on meanwhile.
            async with self._turn:
                front = await asyncio.to_thread(build, self._core, model)
        except Exception as error:  # of the checkpoint's files, and of all that reads them
            worded = isinstance(error, ParserFailed)
            reason = str(error) if worded else f"{type(error).__name__}: {error}"
            log.error(
                "the front half of a model cannot be built: %s",
                reason,
                extra={"fields": {"model": model.name}},
            )
            self._core.send(ModelRefused(model.name, reason))
            raise FrontNotBuilt(reason) from error
        stored.serve(front.state.openai_serving_responses, self._core)
        if self._models.get(model.name) == model:
            self._built[model.name] = front
            while len(self._built) > MAX_FRONTS:
                self._built.popitem(last=False)
        return front


def all_names_of(model: FrontModel) -> Iterator[str]:
    """The names that mean a model: its own, its aliases, and Ollama's for the same."""
    for name in (model.name, *model.aliases):
        yield from names_of(name)


def names_of(name: ModelName) -> Iterator[str]:
    """A name, and Ollama's for the same."""
    yield name
    base, colon, _ = name.partition(":")
    if not colon:
        yield name + LATEST
    elif name.endswith(LATEST):
        yield base


def adapted(model: FrontModel, name: ModelName) -> FrontModel:
    """The model with the adapter that clients call so."""
    return msgspec.structs.replace(model, name=name, base=model.name, adapters=())


def build(core: Core, model: FrontModel) -> ModelFront:
    """Make a model's front half; in any thread, once for a model at a time. Raises whatever the
    checkpoint's files cause."""
    args = arguments(model)
    llm = FrontLLM(core, model, configuration(args, adapters=model.takes_adapters))
    # Guides are checked where they may end the process (`appliance.frontend.guide_compiler`).
    llm.input_processor.structured_outputs_config = None
    prepare_in_turns(llm.renderer)
    guard_chats(llm.renderer, sounds=bool(model.sounds))
    served = with_usable_parsers(model, llm.renderer.tokenizer)
    if served.tool_parser is None:
        args.enable_auto_tool_choice, args.tool_call_parser = False, None
    state = State()
    for name in SERVING:
        setattr(state, name, None)
    asyncio.run(init_app_state(llm, state, args, llm.engine_core.tasks))
    if keep_held_text(state):
        ask_for_single_tokens(state.online_renderer)
    adapt_parsers(state, served)
    decode_in_turns(state)
    if model.pools_tokens:
        # vLLM would compare texts token by token in the worker that has seen the other one.
        state.serving_scores = None
    state.server = SimpleNamespace(should_exit=False)  # what vLLM's error handler looks at
    return ModelFront(model, llm, state)


def arguments(model: FrontModel) -> Namespace:
    """The command line that `vllm serve` would need for the model."""
    options = [
        *("--model", model.path, "--config-format", "hf", "--dtype", model.dtype),
        *("--max-model-len", str(model.max_context), "--max-num-seqs", str(model.max_batch)),
        *("--max-logprobs", str(model.max_logprobs)),
        "--disable-log-stats",
        *("--runner", "pooling" if model.task.pools else "generate"),
    ]
    sounds = model.sounds or int(model.task is Task.TRANSCRIPTION)
    if model.images or sounds:
        options += ["--limit-mm-per-prompt", json.dumps(_limits(model.images, sounds))]
        # What is prepared for one client is not kept for others, which could tell by its time.
        options += ["--mm-processor-cache-gb", "0"]
    else:
        options.append("--language-model-only")
    if model.sounds and read_model_config(Path(model.path)).architecture == VOXTRAL:
        options += ["--tokenizer-mode", "mistral"]
    elif model.images:
        # mistral_common would decode images of any size, which here are looked at first.
        options += ["--tokenizer-mode", "hf"]
    if model.task is Task.GENERATE and model.tool_parser is not None:
        options += ["--enable-auto-tool-choice", "--tool-call-parser", model.tool_parser]
    if model.task is Task.GENERATE and model.reasoning_parser is not None:
        options += ["--reasoning-parser", model.reasoning_parser]
    if model.return_tokens_as_token_ids:
        options.append("--return-tokens-as-token-ids")
    if model.pooler_config:
        options += ["--pooler-config", json.dumps(model.pooler_config)]
    # vLLM writes into what it parses, and defaults are the same objects for all models.
    args: Namespace = deepcopy(_parser().parse_args(options))
    args.served_model_name = list(all_names_of(model))
    args.hf_overrides = whole_config if model.images or sounds else language_config
    args.chat_template = processor_template(Path(model.path)) or None
    return args


def _limits(images: int, sounds: int) -> dict[str, int]:
    """The most of a prompt that vLLM takes, by what it is."""
    return {"image": images, "video": 0, "audio": sounds}


def _but_adapters(model: FrontModel) -> FrontModel:
    return msgspec.structs.replace(model, adapters=())


def configuration(args: Namespace, *, adapters: bool = False) -> VllmConfig:
    """As vLLM's own server without a GPU makes it: no device is asked for, nothing is reserved."""
    envs.VLLM_CPU_KVCACHE_SPACE = 0
    register_types()
    engine = AsyncEngineArgs.from_cli_args(args)
    model_config = engine.create_model_config()
    model_config.quantization = None  # kernels are the workers' concern
    structured = engine.create_structured_outputs_config()
    # Serving objects read the parser where the arguments have it.
    args.structured_outputs_config = structured
    lora = LoRAConfig() if adapters else None
    return VllmConfig(
        model_config=model_config, structured_outputs_config=structured, lora_config=lora
    )


@cache
def _parser() -> Any:
    return make_arg_parser(FlexibleArgumentParser())
