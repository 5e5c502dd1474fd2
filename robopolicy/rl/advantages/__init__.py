"""Advantage estimators: one module per family."""
