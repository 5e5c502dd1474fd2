"""Models learned beside the policy that say more than an outcome does."""
