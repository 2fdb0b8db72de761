"""Checkpoints with an adapter for each task (Jina's embeddings v3): with the configured one,
vectors are those of transformers' model with the sums, and images hold these sums."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from appliance.checkpoints.architectures.task_adapters import TaskRefused
from appliance.checkpoints.safetensors import read_header, weight_files
from appliance.engines.protocol import Verdict
from appliance.engines.vllm.weights.adapted import AdaptedOrigin, Rows
from appliance.engines.vllm.weights.products import Product, find_products
from appliance.memory.weight_cache.image_writer import ImageWriter
from appliance.memory.weight_cache.images import ImageFolder
from appliance.vocabulary import Task
from tests.configs import CONFIGS
from tests.engine.house import SLAB, House, make_house
from tests.engine.pooled import vector
from tests.engine.published_encoders import PublishedEncoder, make_published
from tests.engine.test_encoders import CONTEXT, asked, prompts_of
from tests.engine.test_quantized import image

NAME = "jina-embeddings-v3"
TASKS: list[str] = CONFIGS[NAME]["lora_adaptations"]
USUAL = TASKS[-1]
"""What vLLM adds."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> PublishedEncoder:
    return make_published(tmp_path_factory.mktemp("published"), NAME, CONFIGS[NAME])


@pytest.fixture
def house() -> Iterator[House]:
    made = make_house()
    yield made
    for engine in made.engines.values():
        engine.retire()


def build(house: House, path: str, task: str, dtype: str = "float32", **chosen: Any) -> Any:
    return house.build(
        NAME,
        path,
        dtype=dtype,
        task=Task.EMBED,
        max_context=CONTEXT,
        embedding_task=task,
        **chosen,
    )


@pytest.mark.parametrize("task", TASKS)
def test_vectors_are_those_of_the_configured_task(
    house: House, published: PublishedEncoder, task: str
) -> None:
    """With other bytes where weights were before each prompt; also of the first numbers alone."""
    engine = build(house, published.path, task)
    found = []
    prompts = prompts_of(NAME)
    for prompt in prompts:
        house.overwrite_free_memory()
        engine.begin_load()
        engine.add(asked(NAME, "r", prompt))
        found.append(vector(engine.prefill("r", 0)))
        engine.evict_weights()
    engine.begin_load()
    engine.add(asked(NAME, "r", prompts[3], dimensions=64))
    short = np.array(vector(engine.prefill("r", 0)))

    expected = np.array(published.pooled_for(task, [prompt.tokens for prompt in prompts]))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    cut = expected[3][:64] / np.linalg.norm(expected[3][:64])
    np.testing.assert_allclose(short, cut, rtol=1e-3, atol=1e-5)
    for other in set(TASKS) - {task}:
        others = np.array(published.pooled_for(other, [prompt.tokens for prompt in prompts]))
        assert np.abs(others - expected).max() > 0.01, "the adapters do nothing"


def test_a_task_without_an_adapter_is_refused(house: House, published: PublishedEncoder) -> None:
    with pytest.raises(TaskRefused, match=r"no adapter for 'retrieval'; use retrieval.query, "):
        build(house, published.path, "retrieval")


def converted(published: PublishedEncoder, folder: Path, dtype: torch.dtype, files: int) -> Path:
    """The checkpoint with numbers of another type, in so many files that each matrix has the parts
    of its adapters in others."""
    folder.mkdir()
    for small in Path(published.path).glob("*.json"):
        (folder / small.name).write_bytes(small.read_bytes())
    stored = load_file(Path(published.path) / "model.safetensors")
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(files)]
    for number, (name, tensor) in enumerate(sorted(stored.items())):
        parts[number % files][name] = tensor.to(dtype)
    names = [f"model-{n}.safetensors" for n in range(files)]
    places = {name: names[n] for n, part in enumerate(parts) for name in part}
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def products(path: Path, task: str) -> dict[str, torch.Tensor]:
    """All sums, as a fill makes them, by the names that the checkpoint would have for them."""
    files = [read_header(file) for file in weight_files(path)]
    contents = [file.path.read_bytes() for file in files]

    def read(use: str, file: int, offset: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(
            bytearray(contents[file][offset : offset + nbytes]), dtype=torch.uint8
        )

    made = {}
    for product in find_products(files, task).values():
        if isinstance(product, Product):
            count = int(np.prod(product.shape))
            made[product.name] = product.origin.numbers(0, count, read).view(product.shape)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_those_of_vllms_own_code(
    published: PublishedEncoder, tmp_path: Path, dtype: torch.dtype
) -> None:
    """For its task, of numbers of each type that may be stored, wherever the parts lie. It adds
    products up in another order, so that some sums are rounded to the number next to its."""
    from vllm.model_executor.models.bert_with_rope import JinaRobertaModel

    path = converted(published, tmp_path / "converted", dtype, files=3)
    stored = [item for file in path.glob("*.safetensors") for item in load_file(file).items()]
    config = SimpleNamespace(lora_alpha=1, lora_rank=4)
    device = SimpleNamespace(device_config=SimpleNamespace(device="cpu"))
    model = SimpleNamespace(config=config, vllm_config=device)

    merge: Any = JinaRobertaModel.jina_merge_lora_weights
    expected = {name: t for name, t in merge(model, iter(stored)) if t.dim() == 2}
    found = products(path, "")

    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == dtype
        steps = (tensor - expected[name]).abs() / torch.finfo(dtype).eps
        assert steps.max() <= expected[name].abs().max() * 4, name
        assert (tensor == expected[name]).float().mean() > (0.5 if dtype.itemsize == 4 else 0.99)


@pytest.mark.parametrize(("first", "count"), [(0, 70), (3, 1), (9, 25), (10, 10), (69, 1)])
def test_any_part_of_a_matrix_has_the_bits_of_the_whole(first: int, count: int) -> None:
    """Whatever rows are made at a time; and only these rows are read, and one task's adapter."""
    numbers = torch.Generator().manual_seed(3)
    original = torch.randn(7, 10, generator=numbers).bfloat16()
    left, right = torch.randn(7, 4, generator=numbers), torch.randn(4, 10, generator=numbers)
    parts = {(0, 100): original, (1, 200): left, (2, 300): right}
    origin = AdaptedOrigin(
        "w",
        Rows(0, 100, 10, torch.bfloat16),
        Rows(1, 200, 4, torch.float32),
        Rows(2, 300, 10, torch.float32),
        0.25,
    )
    taken: list[tuple[int, int, int]] = []

    def read(use: str, file: int, offset: int, nbytes: int) -> torch.Tensor:
        taken.append((file, offset, nbytes))
        start, whole = next((at, part) for (n, at), part in parts.items() if n == file)
        return whole.flatten().view(torch.uint8)[offset - start : offset - start + nbytes].clone()

    found = origin.numbers(first, count, read)
    ranges, read_then = origin.ranges(first, count), list(taken)
    whole = origin.numbers(0, 70, read)

    assert torch.equal(found, whole[first : first + count])
    expected = (original.float() + 0.25 * (left.double() @ right.double())).bfloat16()
    torch.testing.assert_close(whole.view(7, 10), expected, rtol=2**-7, atol=1e-6)
    assert read_then == ranges
    rows = (first + count - 1) // 10 - first // 10 + 1
    assert [nbytes for _, _, nbytes in ranges] == [rows * 20, rows * 16, 160]


def start(path: Path, folder: Path, task: str) -> House:
    """An engine as one start of the appliance has it, with its images in the folder."""
    house = make_house()
    writer = ImageWriter(house.host)
    folder.mkdir(exist_ok=True)
    build(house, str(path), task, "bfloat16", images=ImageFolder(folder, 0, writer), verify=True)
    writer.join()
    return house


def test_images_are_kept_of_each_task(
    published: PublishedEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to each other. The second start reads them; they have the bytes that are made in pieces
    of a few rows; and one bit of a sum that differs on the device is seen."""
    from appliance.engines.vllm.weights import loading

    path = converted(published, tmp_path / "converted", torch.bfloat16, files=2)
    images, packed = [], []
    for task in ("", *TASKS[:2], "", *TASKS[:2]):
        house = start(path, tmp_path / "images", task)
        images.append(image(house, NAME))
        packed.append(house.engines[NAME]._placed.kept.packed)
        house.host.close()
    assert packed == [True, True, True, False, False, False]
    assert images[:3] == images[3:]
    assert len({str(one) for one in images}) == 3

    monkeypatch.setattr(loading, "PIECE_BYTES", 4096)
    house = make_house()
    engine = build(house, str(path), TASKS[0], "bfloat16")
    assert image(house, NAME) == images[1]
    engine.begin_load().wait()
    assert engine.verify() is Verdict.OK
    layout = engine._placed.weights.layout
    (offset,) = [
        at
        for tensor, at in zip(layout.tensors, layout.offsets, strict=True)
        if tensor.name.endswith("word_embeddings.weight")
    ]
    slab, begin = divmod(offset + 5, SLAB)
    house.host.view(house.images[NAME][slab] + begin, 1)[0] ^= 1
    assert engine.verify() is Verdict.DIFFERS


def test_kept_images_of_other_tasks_and_arithmetic_are_not_read() -> None:
    """They are known by the text of their origins."""
    rows = Rows(0, 8, 4, torch.float32)
    one = AdaptedOrigin("w", rows, rows, rows, 0.25)
    others = [
        one._replace(left=rows._replace(offset=64)),
        one._replace(factor=0.5),
        one._replace(version=0),
    ]

    assert len({repr(origin) for origin in (one, *others)}) == 4
