"""Models with weights in 4 and 8 bits under a daemon, in a pool that does not hold all of them.

Every output is plain vLLM's, also after a second start, which reads the images that the first left.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import httpx

from appliance.config.loader import load_config
from appliance.demo.run import running_daemon
from tests.configs import CONFIGS
from tests.engine.quantizing import (
    awq_config,
    gptq_config,
    modelopt_config,
    multiply,
    quantize,
    to_floats,
    to_nvfp4,
    w8a8_config,
    why_not_computed,
)
from tests.engine.shrunken import make_shrunken
from tests.patience import PATIENCE_SECONDS, until
from tests.system.test_kinds import PROMPTS, SHORT_TURNS, ask, configure, plain

MODELS = {
    name: config
    for name, config in {
        "llama-3.1-8b-instruct": awq_config(32),
        "qwen2.5-7b-instruct": gptq_config(128),
        "qwen3-8b": w8a8_config(),
    }.items()
    if not why_not_computed(config)
}
"""Without those that plain vLLM does not compute on this CPU."""
EXPERTS, FLOATS, NVFP4 = "qwen3-30b-a3b", "mistral-7b-v0.3", "deepseek-r1-distill-llama-8b"
PRODUCTS = (EXPERTS, FLOATS, NVFP4)
"""In W8A8 with experts, floats of 8 bits, and NVFP4: their outputs are those of checkpoints that
have the products."""
POOL = "3MiB"

Outputs = dict[tuple[str, int], list[int]]


def test_outputs_equal_plain_vllm(tmp_path: Path) -> None:
    paths = {}
    for name, config in MODELS.items():
        paths[name] = make_shrunken(tmp_path, name, CONFIGS[name])
        quantize(paths[name], config)
    products = {
        name: make_shrunken(tmp_path / "products", name, CONFIGS[name]) for name in PRODUCTS
    }
    paths |= {name: str(shutil.copytree(products[name], tmp_path / name)) for name in PRODUCTS}
    quantize(paths[EXPERTS], w8a8_config() | {"ignore": ["lm_head", "re:.*gate$"]})
    multiply(paths[EXPERTS], products[EXPERTS])
    to_floats(paths[FLOATS], products[FLOATS], (32, 32))
    to_nvfp4(paths[NVFP4], products[NVFP4], modelopt_config())
    same = {**products, **{name: paths[name] for name in MODELS}}  # those with experts first
    expected = plain(same, "appliance.engines.vllm.reference", "bfloat16")
    file = configure(
        tmp_path,
        paths,
        f'memory = "{POOL}"\nhost_cache = "64MiB"\nimages = "images"\n{SHORT_TURNS}',
        dtype="auto",
    )

    logs, kept = [], []
    for _ in range(2):
        with running_daemon(file, load_config(file)) as (url, _):
            assert asyncio.run(ask_all(url)) == expected
            until(lambda: len(images(tmp_path)) == len(paths))
        kept.append(images(tmp_path))
        logs.append((tmp_path / "daemon.log").read_text(errors="replace"))
    assert kept[0] == kept[1], "the second start read the images of the first"
    assert re.search(r'"preemptions":[1-9]', "".join(logs)), "they took turns"


def images(folder: Path) -> dict[str, int]:
    """When each of the whole images was written."""
    return {file.name: file.stat().st_mtime_ns for file in (folder / "images").glob("*.packed")}


async def ask_all(url: str) -> Outputs:
    """All prompts of all models at once."""
    outputs: Outputs = {}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
        await asyncio.gather(
            *(
                ask(client, name, number, outputs.setdefault((name, number), []), lambda: None)
                for name in (*MODELS, *PRODUCTS)
                for number in range(len(PROMPTS))
            )
        )
    return outputs
