"""Executors of models, each behind `appliance.engines.protocol`."""
