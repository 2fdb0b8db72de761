"""What a request takes in the block tables of a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.checkpoints.kv_layers import BlockTables, KvLayers
from appliance.checkpoints.windows import STEP_TOKENS, window_blocks
from appliance.vocabulary import KvShape

TOKENS = st.integers(1, 20_000)
SHAPES = st.builds(
    KvShape,
    block_tokens=st.sampled_from([16, 32, 544]),
    block_bytes=st.just(3000),
    group_blocks=st.just(4),
    group_slabs=st.just(2),
    tables=st.integers(0, 3),
    state_blocks=st.integers(0, 3),
    windows=st.lists(st.integers(1, 130), max_size=5).map(tuple),
    step_blocks=st.integers(0, 64),
    snapshot_blocks=st.integers(0, 5),
    image_token_bytes=st.just(90),
    most_images=st.just(3),
    window_tokens=st.sampled_from([0, 16, 64]),
)


@given(SHAPES, TOKENS)
def test_more_tokens_never_take_fewer_blocks(shape: KvShape, tokens: int) -> None:
    """So what is enough at the end of some steps is enough for each of them."""
    more = shape.blocks(tokens + 1) - shape.blocks(tokens)
    assert 0 <= more <= shape.tables + len(shape.windows)
    assert shape.prompt_blocks(tokens) <= shape.prompt_blocks(tokens + 1)


@given(SHAPES, TOKENS)
def test_a_prompt_takes_what_its_request_has_then_or_more(shape: KvShape, tokens: int) -> None:
    """Whatever the prefix cache keeps of its states: no request needs that."""
    beyond = shape.prompt_blocks(tokens) - shape.blocks(tokens)
    assert 0 <= beyond <= shape.step_blocks * len(shape.windows)
    assert shape.windows or not beyond
    assert shape.blocks(0) == shape.prompt_blocks(0) == 0


@given(SHAPES, st.lists(st.integers(1, 5000), max_size=3), st.integers(0, 5000))
def test_no_prompt_takes_more_than_it_may(shape: KvShape, images: list[int], text: int) -> None:
    """Whatever images it has, of which each has blocks of its own."""
    tokens = sum(images) + text
    blocks = shape.prompt_blocks(tokens, images)
    assert blocks - shape.prompt_blocks(tokens) == sum(map(shape.image_blocks, images))
    assert blocks <= shape.most_blocks(tokens)
    assert all(shape.image_blocks(one) * shape.block_bytes >= one * 90 for one in images)


@given(SHAPES, TOKENS)
def test_windows_bound_what_is_kept(shape: KvShape, tokens: int) -> None:
    of_full = -(-tokens // shape.block_tokens) * shape.tables
    each = -(-tokens // (shape.window_tokens or shape.block_tokens))
    blocks = shape.blocks(tokens) - of_full - shape.state_blocks
    assert blocks <= min(sum(shape.windows), each * len(shape.windows))


def test_bytes_per_token_of_blocks_of_two_lengths() -> None:
    shape = KvShape(32, 6400, 4, 2, tables=1, windows=(9, 9), window_tokens=64)
    assert shape.bytes_per_token == 6400 // 32 + 2 * 6400 // 64
    assert shape.step_tokens == 32


@given(st.integers(1, 5000), st.sampled_from([16, 32]), st.integers(0, 20_000))
def test_what_is_kept_has_all_that_is_attended_to(window: int, size: int, computed: int) -> None:
    """By the next token: those before it in its window, and itself."""
    kept_from = (-(-(computed + 1) // size) - window_blocks(window, size)) * size
    assert kept_from <= max(0, computed - window + 1)


@given(st.integers(1, 40), st.integers(0, 3000), st.sampled_from([16, 32]), TOKENS)
def test_what_an_encoder_made_has_the_same_blocks_for_any_request(
    attention: int, encoded: int, size: int, tokens: int
) -> None:
    """Which are known before an engine is."""
    tables = KvLayers(attention=attention, token_bytes=64, encoded=encoded).tables(size, 448)
    own = -(-tokens // size)
    assert _shape(tables).blocks(tokens) == tables.blocks(tokens) == own + -(-encoded // size)
    assert _shape(tables).blocks(0) == 0


@given(
    st.integers(0, 40), st.integers(1, 40), st.integers(1, 5000), st.integers(1, 1 << 17), TOKENS
)
def test_tables_are_known_before_an_engine_is(
    full: int, windowed: int, window: int, context: int, tokens: int
) -> None:
    """They have places for all layers; what they keep is less, or at most as much."""
    layers = KvLayers(attention=full + windowed, token_bytes=64, windowed=windowed, window=window)
    tables = layers.tables(32, context)
    whole = KvLayers(attention=full + windowed, token_bytes=64).tables(32, context)

    assert tables.layers * (tables.tables + len(tables.windows)) >= full + windowed
    assert bool(tables.windows) is (window_blocks(window, 32) < -(-context // 32))
    if not tables.windows:
        assert tables == whole
    shape = _shape(tables)
    assert tables.blocks(tokens) == shape.blocks(tokens)
    assert tables.step_blocks == (shape.step_blocks if tables.windows else 0)


def _shape(tables: BlockTables) -> KvShape:
    return KvShape(
        block_tokens=tables.block_tokens,
        block_bytes=1,
        group_blocks=1,
        group_slabs=1,
        tables=tables.tables,
        state_blocks=tables.state_blocks,
        windows=tables.windows,
        step_blocks=-(-STEP_TOKENS // tables.block_tokens),
    )
