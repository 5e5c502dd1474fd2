"""Critics beside a policy: what they see, how they are fitted, and policies that act by them."""
