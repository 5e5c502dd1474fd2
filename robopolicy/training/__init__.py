"""Recipes over the protocols: regression (`fit`, `pretrain`) and policy-gradient fine-tuning (`finetune`)."""
