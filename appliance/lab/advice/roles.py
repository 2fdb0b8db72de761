"""Whether a policy's plan suits a box whose models are divided among groups of instances.

A policy that has some instances compute prompts only, and others decode only, may leave a model
that is on few instances without one of both. The daemon then sets the plan aside for that model, so
that what is replayed would not be what the policy means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from appliance.lab.hardware import Box, ModelProfile
from appliance.policies.loader import load_stack
from appliance.scheduling.cost_model import CostModel
from appliance.scheduling.policy_api import ClusterView, InstanceView, ModelView, Placement
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import InstanceClass, ModelName, ModelSpec, Role


def conflict(
    choice: PolicyChoice,
    models: Sequence[ModelSpec],
    profiles: Mapping[ModelName, ModelProfile],
    box: Box,
) -> str:
    """Which model the policies' first plan leaves without an instance for its prompts or for its
    decoding; empty if there is none. Raises what `load_stack` raises."""
    if all(model.instances is None for model in models):
        return ""
    stack = load_stack(choice)
    try:
        view = ClusterView(
            instances=tuple(_idle(number, box) for number in range(box.instances)),
            models=tuple(_unasked(model, profiles[model.name]) for model in models),
        )
        placements = stack.place(0.0, view, CostModel(models))
    finally:
        stack.close()
    for model in models:
        for role, work in ((Role.PREFILL, "computes its prompts"), (Role.DECODE, "decodes it")):
            if not any(_serves(model, role, *one) for one in enumerate(placements)):
                return f"it splits instances by role, and no instance of {model.name} {work} then"
    return ""


def _serves(model: ModelSpec, role: Role, instance: int, placement: Placement) -> bool:
    return model.fits(instance) and placement.role in (role, Role.MIXED)


def _idle(number: int, box: Box) -> InstanceView:
    pool = box.slabs * box.slab_bytes
    return InstanceView(
        id=number,
        role=Role.MIXED,
        instance_class=InstanceClass.MIXED,
        models=None,
        up=True,
        current_model=None,
        groups=(),
        batches=(),
        membership_version=0,
        turn=None,
        turn_began=0.0,
        last_turn=None,
        computing_tokens=0,
        prefills_since_turn=0,
        resident=frozenset(),
        total_bytes=pool,
        free_bytes=pool,
        kv_bytes=0,
    )


def _unasked(model: ModelSpec, profile: ModelProfile) -> ModelView:
    return ModelView(
        name=model.name,
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        slo=model.slo,
        pinned=model.pinned,
        parts=profile.tp,
        arrivals_per_second=0.0,
        tokens_per_second=0.0,
        output_tokens=0.0,
        requests=0,
        last_arrival=0.0,
        instances=model.instances,
        max_batch=model.max_batch,
    )
