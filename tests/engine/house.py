"""What the engine tests share: tiny checkpoints, and engines over one small pool."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from appliance.engines.protocol import Produced, SequenceSpec
from appliance.memory.arena import Arena
from appliance.memory.host_tier import HostTier
from appliance.memory.swapper import Swapper
from appliance.memory.vmm_host import HostVmm
from appliance.vocabulary import Task

SLAB = 256 * 1024
POOL_SLABS = 64
VOCAB = 512
EOS = 2

# name -> (configuration class, type, its arguments): four KV shapes, three architectures.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-mha": (
        "LlamaConfig",
        "float32",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "num_hidden_layers": 3,
        },
    ),
    "qwen2-gqa": (
        "Qwen2Config",
        "float32",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-128": (
        "Qwen3Config",
        "float32",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "num_hidden_layers": 2,
        },
    ),
    "llama-96": (
        "LlamaConfig",
        "float32",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 96,
            "num_hidden_layers": 2,
        },
    ),
    "llama-bf16": (
        "LlamaConfig",
        "bfloat16",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_hidden_layers": 2,
        },
    ),
}


def make_checkpoint(folder: Path, name: str, initializer_range: float = 0.2) -> str:
    """A random checkpoint whose greedy output does not end early by chance. The smaller its numbers
    are, the more its output repeats itself."""
    import torch
    import transformers

    kind, dtype, special = MODELS[name]
    config = getattr(transformers, kind)(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=EOS,
        initializer_range=initializer_range,
        torch_dtype=dtype,
        **special,
    )
    torch.manual_seed(sum(name.encode()))
    path = folder / name
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    save_tokenizer(path)
    return str(path)


def save_tokenizer(folder: Path) -> None:
    """A token for every byte; the vocabulary's other ids stand for nothing."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *letters])}
    encoder = Tokenizer(models.BPE(vocab=words, merges=[]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=encoder, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


Sampling = dict[str, Any]
"""Arguments of vLLM's ``SamplingParams``; what is an object there is a dictionary, too."""

Baseline = Callable[[str, list[tuple[int, ...]], list[Sampling]], list[list[int]]]
PlainAnswers = Callable[..., list[dict[str, Any]]]


@dataclass
class House:
    """Engines over one arena and one host tier, with the places that the ledger would hand out."""

    arena: Any
    host: Any
    swapper: Any
    engines: dict[str, Any] = field(default_factory=dict)
    images: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _next: int = 0

    def places(self, count: int, nbytes: int) -> tuple[int, ...]:
        """New places in the host tier, in descending order, so that none continues another."""
        first = self._next
        self._next += count * nbytes
        assert self._next <= self.host.nbytes, "the test's host tier is too small"
        return tuple(reversed(range(first, self._next, nbytes)))

    def overwrite_free_memory(self) -> None:
        """Nothing is in the pool, and it has other bytes than were there: NaN in any type."""
        from appliance.engines.vllm.weights.tensors import bytes_at

        region = self.arena.reserve("overwritten", self.arena.slabs)
        region.map(range(region.slots))
        bytes_at(region.address, region.slots * self.arena.slab_bytes).fill_(0xFF)
        region.release()

    def swap_places(self, engine: Any, tokens: int) -> tuple[int, ...]:
        return self.places(engine.kv.blocks(tokens), engine.kv.block_bytes)

    def build(
        self,
        model: str,
        path: str,
        *,
        image: tuple[int, ...] = (),
        max_logprobs: int = 20,
        dtype: str = "",
        task: Task = Task.GENERATE,
        max_context: int = 1024,
        pooler_config: dict[str, Any] | None = None,
        prompt_images: int = 0,
        **chosen: Any,
    ) -> Any:
        """Build an engine and store its weights (in the image of another engine, if given);
        `chosen` are further arguments of it."""
        from appliance.engines.vllm.engine import VllmEngine

        engine = VllmEngine.build(
            model,
            path,
            dtype=dtype or MODELS[model][1],
            task=task,
            max_context=max_context,
            max_batch=16,
            arena=self.arena,
            host=self.host,
            swapper=self.swapper,
            max_logprobs=max_logprobs,
            pooler_config=pooler_config,
            prompt_images=prompt_images,
            **chosen,
        )
        places = image or self.places(engine.host_slabs, self.arena.slab_bytes)
        taken = engine.store_weights(places, fill=not image)
        self.images[model] = places[:taken]
        self.engines[model] = engine
        return engine

    def swap_out(self, engine: Any, request: str, places: tuple[int, ...]) -> int:
        """To the end; bytes."""
        transfer = engine.swap_out(request, places)
        self.swapper.settle([transfer])
        moved: int = transfer.trace().moved_bytes
        return moved

    def forget_all(self) -> None:
        """Have no engine hold anything, whatever a test left."""
        for engine in self.engines.values():
            for request in list(engine._scheduler.requests):
                engine.forget(request)
        self.idle()

    def idle(self) -> None:
        """No model holds anything: every slab is free again."""
        for engine in self.engines.values():
            engine.evict_weights()
        self.swapper.settle()
        for engine in self.engines.values():
            assert engine.trim(0).slabs == 0
            assert len(engine._scheduler.blocks.cached_block_hash_to_block) == 0
            assert not engine._scheduler.requests
            assert not engine._runner.requests
            engine._cache.pool.check_integrity()
        self.arena.check_integrity()
        assert self.arena.free == self.arena.slabs
        assert self.arena.high_water <= self.arena.slabs
        self._next = max((max(i) + self.arena.slab_bytes for i in self.images.values()), default=0)


def make_house(slabs: int = POOL_SLABS) -> House:
    vmm = HostVmm(slabs, SLAB)
    arena, host, swapper = Arena(vmm), HostTier.create(256 << 20), Swapper(vmm.stream)
    # Hundreds of houses would not fit in memory. What has their addresses goes with the arena.
    weakref.finalize(arena, _close, vmm, host, swapper).atexit = False
    return House(arena, host, swapper)


def _close(vmm: HostVmm, host: HostTier, swapper: Swapper) -> None:
    """Give back the memory of a house that nothing uses any more."""
    swapper.close()
    host.close()
    vmm.close()


def sequence(
    model: str,
    name: str,
    prompt: tuple[int, ...],
    sampling: Sampling,
    output: tuple[int, ...] = (),
    **asked: Any,
) -> SequenceSpec:
    """`asked` are further fields of the front end's request."""
    return SequenceSpec(
        request=name,
        model=model,
        prompt=prompt,
        output=output,
        body=body(sampling, **asked),
        images=tuple(
            one.mm_position.get_num_embeds()
            for one in asked.get("mm_features", ())
            # What Whisper's encoder makes of a sound is no part of the prompt.
            if one.mm_position.offset + one.mm_position.length <= len(prompt)
        ),
    )


def body(sampling: Sampling, **asked: Any) -> bytes:
    """What the front half sends for a model that ends with `EOS`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    from appliance.engines.vllm.messages import decode_request, encode_params, encode_request

    arguments = {"detokenize": False, **sampling}
    if guide := arguments.get("structured_outputs"):
        arguments["structured_outputs"] = StructuredOutputsParams(**guide)
    if repetition := arguments.get("repetition_detection"):
        arguments["repetition_detection"] = RepetitionDetectionParams(**repetition)
    bad_words = arguments.pop("bad_words_token_ids", None)
    params = SamplingParams(**arguments)
    params.update_from_generation_config({}, EOS)
    params._bad_words_token_ids = bad_words
    return encode_request(msgspec.structs.replace(decode_request(encode_params(params)), **asked))


def tokens(produced: list[Produced]) -> list[int]:
    return [one.token for one in produced]
