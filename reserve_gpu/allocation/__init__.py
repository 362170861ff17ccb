"""Allocation: the choice of devices for a request, by policy, rules, attempts and waits."""
