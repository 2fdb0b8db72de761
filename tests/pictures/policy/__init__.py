"""The figures of docs/policies/appliance.md: what the policy decides in cases small enough to draw.

Each is computed: by the lab, which plays the policy on modelled GPUs, or by the functions that the
policy decides with. So a figure changes, and its test fails, when the policy decides otherwise.
"""
