"""Policy-gradient learner for tokens, denoising steps and flow steps: rollouts become coefficients on
log-probabilities.

Mechanisms are small functions over tensors. They depend on the protocols of `robopolicy.core` and on no concrete world,
policy or configuration. Every policy loss has the form `-sum(w * sg(c) * logp) + auxiliaries`.
"""
