"""Background jobs: the queue, the supervisor and the runners."""
