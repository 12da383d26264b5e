"""What each app answers. An app knows the store, the cache and the pool; no app knows another."""
