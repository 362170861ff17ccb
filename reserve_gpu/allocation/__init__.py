"""Allocation: which devices a request gets, by candidates, rules, policy, attempts and waits."""
