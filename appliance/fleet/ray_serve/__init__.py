"""A fleet as an application of Ray Serve: one proxy for each box, fronts, and a router.

Only this package imports Ray, which is no part of the base install: `appliance[ray]`.
"""
