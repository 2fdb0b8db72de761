"""The paths that front ends answer; every other path is the core's."""

from __future__ import annotations

from typing import Final

FRONT_PATHS: Final = frozenset(
    {
        # OpenAI's and vLLM's
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/completions/render",
        # the core answers /v1/responses/{id}
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/responses/render",
        "/v1/embeddings",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/tokenize",
        "/tokenizer_info",
        "/detokenize",
        # SageMaker's name for whichever of the above a body is meant for
        "/invocations",
        # Anthropic's; the core answers /v1/messages/batches
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        # Cohere's and Jina's
        "/v2/embed",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        # Ollama's that compute; the core answers those of its catalogue
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
    }
)


def is_front_path(path: str) -> bool:
    """Whether front ends answer `path` (decoded, without its query), with any method."""
    return path in FRONT_PATHS


def without_root(path: str, root: str) -> str:
    """What a path below `root` (`api.root_path`) means; any other path means itself."""
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path
