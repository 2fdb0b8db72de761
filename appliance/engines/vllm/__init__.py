"""vLLM behind `appliance.engines.protocol`: the only package that imports vllm.

Importing this package imports neither torch nor vllm; `engine` does. A worker calls
`prepare_environment` first.
"""

from appliance.engines.vllm.environment import prepare_environment

__all__ = ["prepare_environment"]
