"""Reasoning of one model: which tokens it lies between, and how many it may take.

The front end's parsers tell it from the answer. An engine has to know, too, where it ends: guides
begin there, and a request may have a budget of tokens for it. Both take the model's tokenizer,
which is loaded when the first request needs it.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

from vllm.config import VllmConfig
from vllm.config.reasoning import ReasoningConfig
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.worker.gpu_input_batch import InputBatch

_loading = threading.Lock()


def tokenizer_of(config: VllmConfig) -> Any:
    """The model's, although its engine is built without. May be called from any thread."""
    with _loading:
        return cached_tokenizer_from_config(_with_tokenizer(config))


def parser_of(name: str) -> type[ReasoningParser] | None:
    """vLLM's parser of that name; None if the name is empty. Raises `KeyError`."""
    return ReasoningParserManager.get_reasoning_parser(name) if name else None


class ThinkingBudgets:
    """Lets requests have a budget of tokens for their reasoning."""

    def __init__(self, parser: str, config: VllmConfig, batch: InputBatch) -> None:
        self._parser = parser
        self._config = config
        self._batch = batch

    def allow(self) -> None:
        """From now on budgets are kept to. Raises `ValueError` where the model's reasoning is not
        known to lie between tokens."""
        if self._batch.thinking_budget_state_holder is not None:
            return
        if not self._parser:
            raise ValueError("thinking_token_budget: the model has no reasoning parser")
        reasoning = ReasoningConfig(reasoning_parser=self._parser)
        try:
            with _loading:
                reasoning.initialize_token_ids(_with_tokenizer(self._config))
        except Exception as error:  # of the parser, about a tokenizer that is not its model's
            raise ValueError(f"thinking_token_budget: {error}") from error
        if not reasoning.enabled:
            raise ValueError(f"thinking_token_budget: {self._parser} does not say where it ends")
        self._batch.thinking_budget_state_holder = _Budgets(
            reasoning,
            self._config.scheduler_config.max_num_seqs,
            0,
            self._batch.device,
            is_pin_memory=False,
        )


class _Budgets(ThinkingBudgetStateHolder):  # type: ignore[misc]
    """vLLM's, which knows only of requests that stay in its batch from their first token on. Of one
    that comes with an output, the part of it that was reasoning is found here."""

    def _init_state_entry(self, prompt: list[int] | None, budget: int) -> dict[str, Any]:
        state: dict[str, Any] = super()._init_state_entry(prompt, budget)
        return state | {"came": True}

    def _update_think_state(self, state: dict[str, Any]) -> None:
        if state.pop("came", False) and state["output_tok_ids"]:
            self._resume(state)
        super()._update_think_state(state)

    def _resume(self, state: dict[str, Any]) -> None:
        """Pass by all reasoning that has ended; each had the whole budget."""
        output, begin, end = (
            state["output_tok_ids"],
            self.think_start_token_ids,
            self.think_end_token_ids,
        )
        behind = 0
        start = 0 if state["continue_thinking"] else _find(output, begin, 0)
        while start is not None:
            ended = _find(output, end, start)
            if ended is None:
                break
            if state["continue_thinking"]:
                state |= super()._init_state_entry(None, state["thinking_token_budget"]) | {
                    "prompt_tok_ids": state["prompt_tok_ids"],
                    "output_tok_ids": output,
                }
            behind = ended + len(end)
            start = _find(output, begin, behind)
        if start is not None and not state["continue_thinking"]:
            state["start_thinking"] = start
        state["scan_offset"] = behind


def _find(tokens: list[int], part: list[int], start: int) -> int | None:
    """Where the part begins first, from `start` on; O(tokens)."""
    while True:
        try:
            start = tokens.index(part[0], start)
        except ValueError:
            return None
        if tokens[start : start + len(part)] == part:
            return start
        start += 1


def _with_tokenizer(config: VllmConfig) -> Any:
    model_config = copy.copy(config.model_config)
    model_config.skip_tokenizer_init = False
    return model_config
