"""How good every decision was: one module a family of estimators."""
