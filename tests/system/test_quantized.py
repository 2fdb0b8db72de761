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
from tests.engine.quantizing import awq_config, gptq_config, quantize, to_floats, w8a8_config
from tests.engine.shrunken import make_shrunken
from tests.patience import PATIENCE_SECONDS
from tests.system.test_kinds import PROMPTS, SHORT_TURNS, ask, configure, plain

MODELS = {
    "llama-3.1-8b-instruct": awq_config(32),
    "qwen2.5-7b-instruct": gptq_config(128),
    "qwen3-8b": w8a8_config(),
}
FLOATS = "mistral-7b-v0.3"
"""In floats of 8 bits: its outputs are those of a checkpoint that has their products."""
POOL = "3MiB"

Outputs = dict[tuple[str, int], list[int]]


def test_outputs_equal_plain_vllm(tmp_path: Path) -> None:
    paths = {}
    for name, config in MODELS.items():
        paths[name] = make_shrunken(tmp_path, name, CONFIGS[name])
        quantize(paths[name], config)
    products = make_shrunken(tmp_path / "products", FLOATS, CONFIGS[FLOATS])
    paths[FLOATS] = str(shutil.copytree(products, tmp_path / FLOATS))
    to_floats(paths[FLOATS], products, (32, 32))
    same = {**paths, FLOATS: products}
    expected = plain(same, "appliance.engines.vllm.reference", "bfloat16")
    file = configure(
        tmp_path,
        paths,
        f'memory = "{POOL}"\nhost_cache = "64MiB"\nimages = "images"\n{SHORT_TURNS}',
        dtype="auto",
    )

    for _ in range(2):
        with running_daemon(file, load_config(file)) as (url, _):
            assert asyncio.run(ask_all(url)) == expected
    log = (tmp_path / "daemon.log").read_text(errors="replace")
    assert re.search(r'"preemptions":[1-9]', log), "they took turns"
    kept = [path for path in (tmp_path / "images").rglob("*") if path.is_file()]
    assert len(kept) >= len(MODELS)


async def ask_all(url: str) -> Outputs:
    """All prompts of all models at once."""
    outputs: Outputs = {}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
        await asyncio.gather(
            *(
                ask(client, name, number, outputs.setdefault((name, number), []), lambda: None)
                for name in (*MODELS, FLOATS)
                for number in range(len(PROMPTS))
            )
        )
    return outputs
