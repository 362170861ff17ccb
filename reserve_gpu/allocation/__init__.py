"""Choose devices for a request, applying the allocation policy and the administrator's rules."""
