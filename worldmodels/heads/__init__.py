"""What world models predict beside observations: reward, success, value, and how sure they are."""
