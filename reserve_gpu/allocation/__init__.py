"""Which devices a request gets: candidates, policy, rules, one attempt, and the wait."""
