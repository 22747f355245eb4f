"""expert sample: answers, token by token."""
