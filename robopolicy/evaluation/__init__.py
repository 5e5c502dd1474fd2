"""Evaluation: success with intervals over paired seeds, policy ranking, rollout videos, plots and self-contained
reports.
"""
