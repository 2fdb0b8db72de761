"""What vLLM is shown of a checkpoint's ``config.json``: its argument `hf_overrides`."""

from __future__ import annotations

from typing import Any, Final

from appliance.checkpoints.architectures.chat_sounds import HOP, RATE, VOXTRAL, WINDOW
from appliance.checkpoints.architectures.encoders import JINA, NOMIC, ROTARY
from appliance.checkpoints.language_models import MEDIA
from appliance.checkpoints.model_config import VLLM_NAMES
from appliance.checkpoints.quantized import quantization

_OF_ALL: Final = (
    "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config",
    "compression_config",
)  # fmt: skip
"""What the configuration of a language model takes over from that of the whole."""
_SECTIONS: Final = ("mrope_section", "mrope_interleaved")


def language_config(config: Any) -> Any:
    """The part of transformers' configuration of a checkpoint that is about its language model, for
    vLLM's `hf_overrides`; other configurations as they are.

    Rotary embeddings with three positions (M-RoPE) become those with one: a token of text has the
    same one three times. And vLLM does not see that weights are floats of 8 or 4 bits.
    """
    quantization.forget(config)
    _rename(config)
    (architecture, *_) = config.architectures or ("",)
    if architecture not in MEDIA:
        return config
    text = config.get_text_config()
    text.architectures = [MEDIA[architecture].languages[text.model_type]]
    # Transformers has no default for the whole of models that read sound.
    if hasattr(config, "tie_word_embeddings"):
        text.tie_word_embeddings = config.tie_word_embeddings
    for key in _OF_ALL:
        if (value := getattr(config, key, None)) is not None:
            setattr(text, key, value)
    rope = text.rope_parameters
    if isinstance(rope, dict) and not rope.keys().isdisjoint(_SECTIONS):
        text.rope_parameters = {
            key: "default" if value == "mrope" else value
            for key, value in rope.items()
            if key not in _SECTIONS
        }
    return text


def _rename(config: Any) -> None:
    """Have a configuration say what vLLM reads by the names that it has for it."""
    config.architectures = [VLLM_NAMES.get(name, name) for name in config.architectures or ()]
    if NOMIC in config.architectures:
        # Transformers knows newer names only, and would take its defaults.
        config.num_attention_heads = config.n_head
        config.head_dim = config.n_embd // config.n_head
        config.rope_parameters = {"rope_type": "default", "rope_theta": config.rotary_emb_base}
    if JINA in config.architectures and getattr(config, "position_embedding_type", "") == ROTARY:
        config.rope_parameters = {"rope_type": "default", "rope_theta": config.rotary_emb_base}
        if (kind := type(config)).__name__ != _FLASH:
            config.__class__ = type(_FLASH, (kind,), {})


_FLASH: Final = "XLMRobertaFlashConfig"
"""The class of Jina's own code, by whose name vLLM knows rotary models. That code is never run."""


def whole_config(config: Any) -> Any:
    """The same for a checkpoint that is served whole, with what reads images or sound."""
    quantization.forget(config)
    if VOXTRAL in (config.architectures or ()):
        _say_as_mistral(config)
    return config


def _say_as_mistral(config: Any) -> None:
    """Add what Mistral's own file says of Voxtral (`params.json`), and transformers' does not."""
    config.text_config.architectures = ["MistralForCausalLM"]
    encoder = config.audio_config
    encoder.sampling_rate, encoder.hop_length, encoder.window_size = RATE, HOP, WINDOW
    encoder.global_log_mel_max = None
    # So many numbers of the encoder become one token.
    encoder.downsample_factor = encoder.intermediate_size // encoder.hidden_size
