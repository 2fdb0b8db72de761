"""The ledger of usage: what each key had of each model, day by day, on disk."""
