"""What the layers of a model keep of its requests: keys and values of each token or of the last
ones (windows), compressed ones (MLA), or a state of constant size (Mamba, linear attention, short
convolutions); and those of what an encoder made, where a decoder attends to that.

Known of a model before its engine is built, from ``config.json``. vLLM divides the layers among
block tables whose blocks have one size, so a model with states has long blocks: one holds a state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from appliance.checkpoints.architectures.transcribers import encoder_tokens
from appliance.checkpoints.architectures.unequal_layers import (
    Heads,
    heads_of_kinds,
    kept_kinds,
    sharing_layers,
)
from appliance.checkpoints.model_config import CONFIG, MOST, MOST_LAYERS, ModelConfig, known_models
from appliance.checkpoints.windows import STEP_TOKENS, Windowed, window_blocks, windowed
from appliance.errors import CheckpointError
from appliance.platform.cpus import computes_linear_attention

STATE_BYTES: Final = 4
"""Of a number of a state, where it is kept in float32."""
_KV_HEADS: Final = ("num_attention_groups", "multi_query_group_num", "num_kv_heads")
_MULTI_QUERY: Final = frozenset({"falcon", "gpt_bigcode"})
"""Types with one head for keys and values, if the file does not say otherwise."""
_ALIGNED_TOKENS: Final = 128
"""Blocks next to states are a multiple of this with MLA."""
_FEW_MORE: Final = 1.5
"""Tables are as long as the longer kind of layers if that is not as many times the shorter one."""


class BlockTables(NamedTuple):
    """How vLLM divides a model's layers among block tables."""

    layers: int
    """Of a table; the last table of a kind may have fewer, and takes as much."""
    block_tokens: int
    """Of the tables of layers that keep the KV of all tokens."""
    layer_block_bytes: int
    tables: int
    """Of layers that keep the KV of all tokens."""
    state_blocks: int
    """Of a request, whatever its length: one in each table of layers that keep a state, or those of
    what an encoder made."""
    windows: tuple[int, ...] = ()
    """The most blocks of a request in each table of layers that attend to a window."""
    window_tokens: int = 0
    """Of a block of these tables, if that is not `block_tokens`."""

    def blocks(self, tokens: int) -> int:
        """Of a request of so many tokens."""
        each = -(-tokens // (self.window_tokens or self.block_tokens))
        blocks = -(-tokens // self.block_tokens) * self.tables + self.state_blocks
        return blocks + sum(min(each, most) for most in self.windows)

    @property
    def step_blocks(self) -> int:
        """What a prompt has beyond that in each table of a window, while it is computed."""
        size = self.window_tokens or self.block_tokens
        return -(-STEP_TOKENS // size) if self.windows else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayers:
    """Layers by what they keep, and how large that is, in bytes."""

    attention: int
    """Layers that keep keys and values."""
    token_bytes: int
    """Of one token in one of those."""
    heads: int = 1
    """Heads among which ranks divide that: each has at least one. Compressed KV (MLA) has one."""
    compressed: bool = False
    states: int = 0
    """Layers that keep a state."""
    state_bytes: int = 0
    """Of one request in one of those."""
    windowed: int = 0
    """Layers among those with keys and values that attend to a window, and keep no more."""
    window: int = 0
    """How many tokens that is."""
    window_token_bytes: int = 0
    """Of one token in one of those, if that is not `token_bytes`. One of the two is a multiple of
    the other."""
    encoded: int = 0
    """Tokens that an encoder makes, if as many layers as keep keys and values of a request's tokens
    keep those of these, too."""

    @property
    def all_token_bytes(self) -> int:
        """Of one token in all layers with keys and values."""
        full = self.attention - self.windowed
        return full * self.token_bytes + self.windowed_token_bytes

    @property
    def windowed_token_bytes(self) -> int:
        """How much of that is of layers that attend to a window."""
        return self.windowed * (self.window_token_bytes or self.token_bytes)

    def share(self, ranks: int) -> KvLayers:
        """What one of several ranks keeps, at least. Layers keep as much as each other."""
        return replace(
            self,
            token_bytes=self.token_bytes // self.heads * -(-self.heads // ranks),
            heads=-(-self.heads // ranks),
            state_bytes=-(-self.state_bytes // ranks),
        )

    def tables(self, block_tokens: int, max_context: int) -> BlockTables:
        """Blocks have `block_tokens` tokens, or more where they have to hold a state. Of a model
        with states only, one has all of a request of `max_context` tokens; of one that keeps
        nothing, no request takes any."""
        if not self.states and not self.attention:
            return BlockTables(1, max_context, 1, 0, 0)
        if not self.states:
            return self._attention_tables(block_tokens, -(-max_context // block_tokens))
        if not self.attention:
            return BlockTables(self.states, max_context, self.state_bytes, 0, 1)
        step = max(block_tokens, _ALIGNED_TOKENS) if self.compressed else block_tokens
        tokens = max(1, -(-self.state_bytes // (step * self.token_bytes))) * step
        layers = _of_a_table(self.attention, self.states)
        return BlockTables(
            layers,
            tokens,
            tokens * self.token_bytes,
            -(-self.attention // layers),
            -(-self.states // layers),
        )

    def _attention_tables(self, tokens: int, longest: int) -> BlockTables:
        """Without states. Windows that hold the `longest` request, in blocks, are none, unless
        their layers keep more or less of a token than others: blocks have one size, and hold more
        tokens of those that keep less."""
        size = tokens * max(self.token_bytes, self.window_token_bytes)
        in_window = size // (self.window_token_bytes or self.token_bytes)
        most = window_blocks(self.window, in_window) if self.windowed else 0
        if not self.windowed or (most >= longest and not self.window_token_bytes):
            encoded = -(-self.encoded // tokens)
            return BlockTables(self.attention, tokens, size, 1, encoded)
        full = self.attention - self.windowed
        layers = _of_a_table(full, self.windowed) if full else self.windowed
        windows = (most,) * -(-self.windowed // layers)
        of_full = size // self.token_bytes
        other = in_window if in_window != of_full else 0
        return BlockTables(layers, of_full, size, -(-full // layers), 0, windows, other)


def _of_a_table(one: int, other: int) -> int:
    """How many layers a block table has, of so many layers of two kinds."""
    fewer, more = sorted((one, other))
    return more if more < fewer * _FEW_MORE else fewer


def kv_layers(config: ModelConfig, number_bytes: int, *, cuda: bool) -> KvLayers:
    """What a model keeps whose numbers have `number_bytes`: on GPUs, if `cuda`, else on the CPU.
    Nothing, if its tokens attend in both directions: each prompt is computed in one step.

    Raises `CheckpointError` for a key that is no number, and if no layer attends or keeps a state.
    """
    if config.is_encoder:
        return KvLayers(attention=0, token_bytes=0)
    if encoded := encoder_tokens(config):
        return KvLayers(
            attention=config.integer("decoder_layers"),
            token_bytes=2 * config.integer("hidden_size") * number_bytes,
            heads=config.integer("decoder_attention_heads"),
            encoded=encoded,
        )
    attention, states = _counts(config)
    if not attention and not states:
        raise CheckpointError(f"{config.path / CONFIG}: no layer attends or keeps a state")
    compressed = is_compressed(config)
    has_windows = attention and not states and not compressed
    kept = kept_kinds(config, _kinds(config), layers(config)) if attention else None
    sliding = windowed(config, attention, kept) if has_windows else Windowed(0, 0)
    in_windows = 0
    if compressed:
        elements = config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim")
    elif attention:
        usual = Heads(kv_heads(config), head_dim(config))
        full, in_window = heads_of_kinds(config, usual, kept, layers(config))
        elements = 2 * full.number * full.size
        in_windows = 2 * in_window.number * in_window.size
        if max(elements, in_windows) % min(elements, in_windows):
            raise CheckpointError(
                f"{config.path / CONFIG}: layers keep {elements} and {in_windows} numbers of a "
                "token, of which neither is a multiple of the other"
            )
    else:
        elements = 0
    return KvLayers(
        attention=attention,
        token_bytes=elements * number_bytes,
        heads=kv_heads(config) if attention and not compressed else 1,
        compressed=compressed,
        states=states,
        state_bytes=_state_bytes(config, number_bytes, cuda=cuda) if states else 0,
        windowed=sliding.layers,
        window=sliding.window,
        window_token_bytes=in_windows * number_bytes
        if sliding.layers and in_windows != elements
        else 0,
    )


def heads(config: ModelConfig) -> int:
    """Attention heads; 1 for a model without attention."""
    return config.integer("num_attention_heads", default=None if _counts(config)[0] else 1)


def attention_layers(config: ModelConfig) -> int:
    """Layers that keep keys and values."""
    return _counts(config)[0]


def kv_heads(config: ModelConfig) -> int:
    """Heads for keys and values."""
    if config.model_type in _MULTI_QUERY and not config.get("new_decoder_architecture"):
        return heads(config) if config.get("multi_query") is False else 1
    default = config.first(*_KV_HEADS) or heads(config)
    return config.integer("num_key_value_heads", default=default)


def head_dim(config: ModelConfig) -> int:
    """Numbers of a head."""
    if config.get("qk_nope_head_dim") and not is_compressed(config):  # MiniCPM3
        return config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim")
    usual = config.integer("hidden_size") // heads(config)
    return config.integer("head_dim", default=config.first("attention_head_dim") or usual)


def layers(config: ModelConfig) -> int:
    """Layers of any kind."""
    kinds = _kinds(config)
    return config.integer("num_hidden_layers", default=len(kinds) if kinds else None)


def is_compressed(config: ModelConfig) -> bool:
    """Whether layers keep one compressed vector of each token (MLA)."""
    known = known_models().types.get(config.model_type)
    return known is not None and known.mla and bool(config.get("kv_lora_rank"))


def _kinds(config: ModelConfig) -> list[str] | None:
    """What each layer is, if the file lists that; in NVIDIA's letters, M, * and others."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return list(pattern)
    full = config.get("full_attn_idxs")
    if isinstance(full, list) and config.get("layer_types") is None:  # LFM2
        number = config.integer("num_hidden_layers")
        kinds = ["conv"] * min(number, MOST_LAYERS)
        for layer in full:
            if isinstance(layer, int) and 0 <= layer < len(kinds):
                kinds[layer] = "full_attention"
        return kinds
    kinds = config.first("layers_block_type", "layer_types")
    return [str(kind) for kind in kinds] if isinstance(kinds, list) else None


def _counts(config: ModelConfig) -> tuple[int, int]:
    """Layers that keep keys and values, and layers that keep a state: a layer may keep both."""
    number, kinds = layers(config), _kinds(config)
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict):  # Kimi Linear
        return _length(linear, "full_attn_layers"), _length(linear, "kda_layers")
    if "M" in (kinds or ()):  # Nemotron-H
        return kinds.count("*"), kinds.count("M")  # type: ignore[union-attr]
    if kinds is not None and not _STATES.isdisjoint(kinds):
        states = sum(kind in _STATES for kind in kinds)
        attention = sum("attention" in kind or kind == "hybrid" for kind in kinds)
        return attention - kinds.count("linear_attention"), states
    if config.get("linear_key_head_dim"):  # Qwen3-Next, without a list of its layers
        attention = number // config.integer("full_attention_interval", default=4)
        return attention, number - attention
    if config.get("attn_layer_period"):  # Jamba
        period, offset = config.integer("attn_layer_period"), config.get("attn_layer_offset") or 0
        first = offset if isinstance(offset, int) and 0 <= offset < period else 0
        attention = max(0, -(-(number - first) // period))
        return attention, number - attention
    if config.get("mamba_d_ssm") or config.model_type == "falcon_h1":
        return number, number
    if config.get("state_size"):  # Mamba
        return 0, number
    return number - sharing_layers(config), 0


_STATES: Final = frozenset({"mamba", "conv", "linear_attention", "hybrid"})


def _length(values: dict[str, Any], key: str) -> int:
    found = values.get(key)
    return len(found) if isinstance(found, list) else 0


def _state_bytes(config: ModelConfig, number_bytes: int, *, cuda: bool) -> int:
    """Of one layer: what its convolution looks back at, and what it has summed up of all tokens."""

    def number(*keys: str, default: int | None = None) -> int:
        key = next((key for key in keys if config.get(key) is not None), keys[0])
        return config.integer(key, default=default)

    hidden = config.integer("hidden_size")
    if config.get("conv_L_cache"):  # LFM2
        back = max(1, number("conv_L_cache") - 1)
        return back * number("conv_dim", default=hidden) * number_bytes
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict):  # Kimi Linear
        dim = _of(config, linear, "head_dim")
        width = _of(config, linear, "num_heads") * dim
        back = _of(config, linear, "short_conv_kernel_size") - 1
        return back * 3 * width * number_bytes + width * dim * STATE_BYTES
    if config.get("linear_key_head_dim"):  # Gated Delta Net
        keys = number("linear_num_key_heads") * number("linear_key_head_dim")
        values = number("linear_num_value_heads") * number("linear_value_head_dim")
        back = number("linear_conv_kernel_dim", default=4) - 1
        exact = not cuda or config.get("mamba_ssm_dtype") == "float32"
        summed = values * number("linear_key_head_dim") * (STATE_BYTES if exact else number_bytes)
        return back * (2 * keys + values) * number_bytes + summed
    back = number("mamba_d_conv", "conv_kernel", default=4) - 1
    size = number("mamba_d_state", "ssm_state_size", "state_size")
    mamba_heads = ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
    if config.first(*mamba_heads) is None:  # Mamba 1
        width = number("mamba_expand", "expand", default=2) * hidden
        return back * width * number_bytes + width * size * number_bytes
    width = number(*mamba_heads) * number(
        "mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim"
    )
    groups = number("mamba_n_groups", "mamba_ngroups", "n_groups", default=1)
    # vLLM keeps all states in float32 on a CPU that has the instructions for linear attention.
    exact = config.model_type == "nemotron_h" or (not cuda and computes_linear_attention())
    kept = STATE_BYTES if exact else number_bytes
    return back * (width + 2 * groups * size) * number_bytes + width * size * kept


def _of(config: ModelConfig, part: dict[str, Any], key: str) -> int:
    value = part.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MOST:
        raise CheckpointError(f"{config.path / CONFIG}: {key} must be a positive integer")
    return value
