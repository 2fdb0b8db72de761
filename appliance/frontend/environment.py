"""What a front end's process must look like before vLLM is imported: no device, no network."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from typing import Final

from appliance.frontend.image_files import MAX_PIXELS

_SILENCED: Final = (
    "torch._library.triton",  # there is no Triton
    "vllm.entrypoints.anthropic.serving",  # system messages between others are merged
    "vllm.entrypoints.openai.responses.serving",  # its store has no bounds; the core's has
    "vllm.entrypoints.pooling.scoring.api_router",  # OpenAI has no scores
    "vllm.entrypoints.pooling.utils",  # another JSON library would be faster
    "vllm.platforms.cpu",  # what is changed for the CPU; workers compute elsewhere
    "vllm.triton_utils.importing",  # there is no Triton
)
"""Loggers whose warnings mean nothing in a front end; errors are logged."""

COLLECT_AFTER: Final = (20_000, 20, 20)
"""Thresholds of garbage collection. With Python's own it takes a tenth of a front end's time, as
every chunk of a stream makes objects; few of them are garbage that only a collection finds."""


def prepare_environment() -> None:
    """Set the process up for vLLM's front half; call before anything imports torch or vLLM."""
    logging.getLogger("vllm").setLevel(logging.WARNING)
    for name in _SILENCED:
        logging.getLogger(name).setLevel(logging.ERROR)
    # A call that a model writes and that cannot be parsed is the model's fault, not an operator's.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    os.environ |= {
        # Not even asked for: a driver may start threads, and nothing can be forked then.
        "CUDA_VISIBLE_DEVICES": "",
        # Tokenizers have threads of their own; torch only carries vectors here.
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # Torch makes this folder when all of it is imported; a front end may make none.
        "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir(),
        "VLLM_CONFIGURE_LOGGING": "0",  # its log goes where ours goes
        "VLLM_ENABLE_RESPONSES_API_STORE": "1",  # the core's: appliance.frontend.serving.stored
        "VLLM_MAX_IMAGE_PIXELS": str(MAX_PIXELS),
        "VLLM_MEDIA_CONNECTOR": "refusing",  # appliance.frontend.serving.media
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # what the workers run
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def import_vllm() -> None:
    """Import what serves, which takes seconds, and have vLLM ask for no device."""
    from appliance.engines.vllm.images.libraries import provide_torchvision

    provide_torchvision()
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()

    from appliance.frontend.serving.first_fault import stop_at_first_fault

    stop_at_first_fault()

    from appliance.frontend.app import vllm_application
    from appliance.frontend.serving import media
    from appliance.frontend.serving.engine_client import replace_engine
    from appliance.frontend.serving.inspection import inspect_here
    from appliance.frontend.serving.message_streams import end_with_failures
    from appliance.frontend.serving.published import publish_responses
    from appliance.frontend.serving.quick_union import tell_messages_apart
    from appliance.frontend.serving.seams import check_seams
    from appliance.frontend.serving.single_tokens import replace_collector
    from appliance.frontend.serving.speech import bound_sounds
    from appliance.frontend.serving.trimmed_text import trim_before_tokens

    check_seams()
    media.bound_images()
    bound_sounds()
    assert os.environ["VLLM_MEDIA_CONNECTOR"] == media.CONNECTOR
    replace_engine()
    replace_collector()
    trim_before_tokens()
    tell_messages_apart()
    end_with_failures()
    publish_responses()
    inspect_here()
    vllm_application()
    # Collections of garbage need not look at what was imported, and forks share its memory.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
