"""Success with intervals over paired seeds, ranking of policies, rollout videos, plots and self-contained reports."""
